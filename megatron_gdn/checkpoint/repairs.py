"""Everything that makes the host's own optimizer checkpoints right."""

from megatron_gdn.checkpoint.chained_optimizer import follow_expert_parallel_size
from megatron_gdn.checkpoint.distributed_optimizer import repair_distributed_optimizer
from megatron_gdn.checkpoint.float16_optimizer import repair_float16_optimizer


def repair_optimizer_checkpoints() -> None:
    """Make the host save and load its optimizers exactly; call it before it builds them."""
    repair_distributed_optimizer()
    repair_float16_optimizer()
    follow_expert_parallel_size()
