"""Lets Megatron run where there is no GPU: on gloo, with every "cuda" tensor on the CPU.

megatron-core places its tensors with `device="cuda"` and asks `torch.cuda` for streams, devices and
random states. `enable()` puts plain CPU stand-ins in those places. It answers no question wrongly that
others ask: `torch.cuda.is_available()` stays False, so data loader workers and torch itself are not misled.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "tensor", "zeros")


def enable() -> bool:
    """Put the stand-ins in place; call it before anything of megatron is imported.

    Does nothing where CUDA is available, and nothing on a second call.

    Returns:
        Whether Megatron now runs on the CPU.
    """
    if torch.cuda.is_available():
        return False
    if not getattr(torch.cuda, "megatron_gdn_stand_ins", False):
        torch.cuda.megatron_gdn_stand_ins = True
        # Compiling the host's small fused functions takes longer than a short run on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        _place_tensors_on_cpu()
        _answer_for_one_device()
        _make_streams_no_ops()
        _use_the_cpu_generator()
        _complete_gloo()
        _hush()
    return True


def skip_helper_compilation() -> None:
    """Let the host use its compiled dataset helper as shipped, whatever the machine.

    The host runs `make` for it at every start, but its wheel ships the compiled module and no
    Makefile, so the start would fail. Where the module is missing, the host's attempt stays.
    """
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None


def fork_checkpoint_writer() -> None:
    """Let the host's checkpoint writer fork its helper process instead of starting a new interpreter.

    A new one imports the training script again, which takes longer than writing a small checkpoint. It
    is needed where CUDA runs, since CUDA does not survive a fork.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = lambda mp_mode="fork": original("fork")


def _is_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _place_tensors_on_cpu() -> None:
    """`torch.zeros(..., device="cuda")` and `tensor.cuda()` give CPU tensors."""

    def on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(factory)
        def make(*args, **kwargs):
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))

    Tensor.cuda = lambda self, *args, **kwargs: self

    # The optimizers sort parameters by comparing `tensor.type()` with "torch.cuda.FloatTensor".
    original_type = Tensor.type

    def type_(self, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            name = original_type(self)  # which a function mode of torch hands to this function again
            return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original_type(self, dtype, non_blocking, **kwargs)

    Tensor.type = type_


def _answer_for_one_device() -> None:
    """One device per rank: the host starts model parallelism only where it counts a device."""
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.set_device = lambda device: None
    # Read only to decide on settings that older GPUs need (CUDA_DEVICE_MAX_CONNECTIONS, grouped GEMM).
    torch.cuda.get_device_capability = lambda device=None: (10, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=10, minor=0, name="cpu")


class _NoStream(contextlib.AbstractContextManager):
    """Stands for a stream, an event and the context that enters a stream: the CPU has one order only."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __exit__(self, *exc_info):
        return None

    def query(self) -> bool:
        return True

    def _nothing(self, *args, **kwargs) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: object = None) -> object:
        return event or _NoStream()


def _make_streams_no_ops() -> None:
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.stream = lambda stream: _NoStream()
    torch.cuda.current_stream = lambda device=None: _NoStream()
    torch.cuda.default_stream = lambda device=None: _NoStream()
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.is_current_stream_capturing = lambda: False
    Tensor.record_stream = lambda self, stream: None


def _use_the_cpu_generator() -> None:
    """CUDA random states are those of the CPU generator.

    Without a device torch queues such calls for ever (`_lazy_call`), so seeds would be lost silently.
    """

    def get_rng_state(device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = get_rng_state
        module.set_rng_state = set_rng_state
        module.manual_seed = torch.default_generator.manual_seed
        module.manual_seed_all = torch.default_generator.manual_seed
    torch.cuda._lazy_call = lambda call, **kwargs: call()
    torch.cuda._lazy_init = lambda: None

    class OneGenerator:
        def __getitem__(self, index: object) -> torch.Generator:
            return torch.default_generator

    torch.cuda.default_generators = OneGenerator()


def _complete_gloo() -> None:
    """Calls that NCCL serves and gloo does not, or that the host makes differently without a GPU."""
    all_to_all_single = dist.all_to_all_single
    all_gather = dist.all_gather
    reduce_scatter = dist.reduce_scatter

    # The host's MoE dispatcher turns split sizes into lists only when they come from a GPU.
    def all_to_all_single_(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        splits = (s.tolist() if isinstance(s, Tensor) else s for s in (output_split_sizes, input_split_sizes))
        return all_to_all_single(output, input, *splits, **kwargs)

    # gloo takes shards of one size only; the host's expert tensor parallelism has uneven ones.
    def all_gather_(tensor_list, tensor, group=None, async_op=False):
        if len({t.shape for t in tensor_list}) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        rows = max(t.shape[0] for t in tensor_list)
        padded = [t.new_empty(rows, *t.shape[1:]) for t in tensor_list]
        mine = tensor.new_zeros(rows, *tensor.shape[1:])
        mine[: tensor.shape[0]] = tensor
        all_gather(padded, mine, group=group)
        for out, whole in zip(tensor_list, padded, strict=True):
            out.copy_(whole[: out.shape[0]])

    def reduce_scatter_(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({t.shape for t in input_list}) == 1:
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        total = torch.cat(input_list)
        dist.all_reduce(total, op=op, group=group)
        output.copy_(total.split([t.shape[0] for t in input_list])[dist.get_rank(group)])

    dist.all_to_all_single = all_to_all_single_
    dist.all_gather = all_gather_
    dist.reduce_scatter = reduce_scatter_


def _hush() -> None:
    """Silence what is no news here: one generator for both devices, no TE, no Triton, no pinned memory."""

    class NotTheSharedGenerator(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(NotTheSharedGenerator())
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for words in ("pin_memory", "not installed", "transformer-engine", "Triton is not supported"):
        warnings.filterwarnings("ignore", message=f".*{words}", category=UserWarning)
