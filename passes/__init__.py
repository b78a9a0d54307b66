"""The compiler's passes, one public function per file, named after it. Internal: public names come from `tpcompiler`.

In the order in which they run: canonicalize, apply_plan, divide_sizes, mark_placements | insert_reshards,
delay_reductions, fold_reshards, lower_reshards, localize_shapes | shard_state, build_rank_program, move_device.
"""
