"""What the guards share."""

from __future__ import annotations


def refuse_hidden_hook(cls: type, mixin: type, hook: str) -> None:
    """Raise TypeError where a base that knows nothing of the mixin comes first and defines the method with the lock.

    Its method would be found first, and the class would run unlocked in silence.
    """
    for base in cls.__mro__[1 : cls.__mro__.index(mixin)]:
        if hook in vars(base) and not issubclass(base, mixin):
            raise TypeError(
                f"{cls.__qualname__}: {base.__qualname__} comes before {mixin.__qualname__} and defines {hook}(), so"
                f" nothing would be locked. Name {mixin.__qualname__} first."
            )
