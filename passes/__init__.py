"""The compiler's passes, one public function per file, named after it. Internal: public names come from `tpcompiler`.

In the order in which they run: canonicalize, flatten_branches, apply_plan, regions.join_branches,
regions.spread_experts, divide_sizes, regions.attend_in_turns, place |
fold_reshards, choose_paths, lower_reshards, localize_shapes |
shard_state, build_rank_program, fit_collectives, move_device.
"""
