"""A word from other threads to a step that is being computed: give it up. Read between layers, by Python and by C++."""

from __future__ import annotations

import ctypes


class StepInterruptedError(Exception):
    """A step was given up between two layers. Nothing of it counts as computed."""


class StopFlag:
    """Raised by any thread, read by the one that computes.

    Attributes:
        address: of an int32 that is not 0 while the flag is up.
    """

    def __init__(self) -> None:
        self._is_up = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._is_up)

    def set(self) -> None:
        """Whatever computes is to stop after its layer."""
        self._is_up.value = 1

    def clear(self) -> None:
        """Before a step."""
        self._is_up.value = 0

    def check(self) -> None:
        """Raises `StepInterruptedError` while the flag is up."""
        if self._is_up.value:
            raise StepInterruptedError
