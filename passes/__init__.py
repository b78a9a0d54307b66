"""The compiler's passes, one public function per file, named after it. Internal: public names come from `tpcompiler`.

In the order in which they run: canonicalize, apply_plan, join_branches, spread_experts, divide_sizes, attend_in_turns,
place | fold_reshards, choose_paths, lower_reshards, localize_shapes |
shard_state, build_rank_program, fit_collectives, move_device.
"""
