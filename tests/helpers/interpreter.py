"""Triton's interpreter with the numpy of today."""

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def take_loop_bounds_from_arguments() -> None:
    """Let `range(n)` of a kernel's argument n run: numpy no longer makes an int of an array of one number.

    Triton 3.6 wants that of numpy; it says so in a TypeError about 0-dimensional arrays.
    """

    def patch(tensor, scope):
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
