"""What autograd keeps for the backward pass, in bytes, on any device."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Saved:
    """What autograd holds instead of a tensor, so that it shows when autograd lets go."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class SavedBytes:
    """Memory behind the tensors that autograd holds, each storage once; see `watch_saved_bytes`."""

    def __init__(self, ignored: Iterable[Tensor]):
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._looked = self._since = 0
        self.peak = 0
        """Most that was held after any tensor was saved, also in the backward pass, to 1%."""

    def pack(self, tensor: Tensor) -> _Saved:
        """Take what autograd saves."""
        saved = _Saved(tensor)
        self._saved.add(saved)
        self._since += tensor.untyped_storage().nbytes()
        if 100 * self._since > self._looked:  # looking every time would take longer than the step
            self._looked, self._since = self.now(), 0
            self.peak = max(self.peak, self._looked)
        return saved

    def now(self) -> int:
        """Held at this moment. A storage that was emptied after it was saved counts nothing."""
        storages = {}
        for saved in self._saved:
            storage = saved.tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        return sum(size for key, size in storages.items() if key not in self._ignored)


@contextmanager
def watch_saved_bytes(ignored: Iterable[Tensor] = ()) -> Iterator[SavedBytes]:
    """Watch all that autograd saves on this thread while the context is open.

    Args:
        ignored: tensors that are held anyway, such as parameters.

    Sees what functions give to `save_for_backward`, not what they keep as other attributes. Tensors that a
    recomputation is made from are saved so, and count.
    """
    watch = SavedBytes(ignored)
    with saved_tensors_hooks(watch.pack, lambda saved: saved.tensor):
        yield watch
