"""Every private torch import of the project, and every difference between the supported versions of torch.

Nothing else in the two packages may import a private torch name, or name `torch.ops`. When torch moves, look here.
Everything imported here is exported (pyproject.toml).
"""

from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper_subclass
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from torch.utils._sympy.functions import FloorDiv, Max, Min

from tpcompiler._torch.decompose import decomposed, decomposing, keeping_whole, quiet_torch, stays_whole
from tpcompiler._torch.files import archive_stream, build_program, build_tensor, is_registered_class, save_program
from tpcompiler._torch.groups import (
    default_store,
    fake_group,
    group_is_registered,
    group_over,
    map_symmetric,
    meet_ranks,
    register_group,
    resolve_group,
)
from tpcompiler._torch.halves import Recompute, boxed, cut_joint
from tpcompiler._torch.initializers import skip_fake_truncations
from tpcompiler._torch.joint import Key, has_gradient, input_key, output_keys, trace_joint
from tpcompiler._torch.ops import (
    MISSING,
    NAMED_BY_TORCH,
    WRAPPERS,
    aten,
    c10d_functional,
    calls_others,
    declares_view,
    define_op,
    find_op,
    functional_op,
    is_torchscript_op,
    is_vmap,
    op_overload,
    program_target,
    quantized_decomposed,
    symm_mem,
)
from tpcompiler._torch.optimizers import without_step_hooks
from tpcompiler._torch.own_backwards import (
    accumulated_into,
    hooks_around,
    hooks_behind,
    keep_versions,
    record_own_backwards,
)
from tpcompiler._torch.programs import (
    GRADIENT_KINDS,
    LEAF_KINDS,
    RETURNED_KINDS,
    WRITTEN_KINDS,
    all_tensors,
    check_built,
    copy_graph,
    find_failed_guard,
    forget_index,
    graph_modules,
    guards_of,
    guards_on,
    input_values,
    mode_of_parameters,
    module_inputs,
    names_in_python,
    read_failed_guard,
    set_guards,
    tree_names,
    user_inputs,
    with_graph,
    with_state,
)
from tpcompiler._torch.quick_files import quick_files
from tpcompiler._torch.sizes import (
    divided_range,
    divided_sizes,
    example_sizes,
    shape_facts,
    size_range,
    substituted,
    sym_expr,
    sym_hint,
    sym_multiple,
    symbols_of,
)
from tpcompiler._torch.traces import KnownTensor, trace_ops, untraced
from tpcompiler._torch.versions import GONE, NEWEST, OLDEST, warn_of_newer
