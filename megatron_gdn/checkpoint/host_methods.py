"""Put our own function in the place of a method of the host."""

import functools
from collections.abc import Callable
from typing import Any


def wrap_method(owner: type, name: str, wrapper: Callable) -> None:
    """Replace a method by one that calls `wrapper`; a second call changes nothing.

    Args:
        owner: class of the host.
        name: of the method.
        wrapper: takes the replaced method first, and then what that takes.
    """
    original = getattr(owner, name)
    if hasattr(original, "wrapper"):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    method.wrapper = wrapper
    setattr(owner, name, method)
