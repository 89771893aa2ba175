"""Launches a kernel repeatedly, with arguments that are mostly the same."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from collections.abc import Hashable, Mapping
from typing import Any


class Launch:
    """A kernel with the arguments that are the same at each launch.

    To find the compiled kernel at each launch, Triton inspects all arguments: their types, their
    specialization (such as divisibility by 16), and the values of constants. This class finds the
    compiled kernel once for each `variant` that the caller names, and then launches the kernel
    directly.
    """

    def __init__(self, kernel: Any, fixed: Mapping[str, Any], options: Mapping[str, int]) -> None:
        """`fixed` has arguments by name; `options` has Triton's options, such as `num_warps`."""
        self._kernel = kernel
        self._fixed = fixed
        self._options = options
        self._place_of = {name: place for place, name in enumerate(kernel.arg_names)}
        self._arguments: list[Any] = [None] * len(self._place_of)
        for name, value in fixed.items():
            self._arguments[self._place_of[name]] = value
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], variant: Hashable, **changing: Any) -> None:
        """Launch the kernel; `changing` has all arguments that are not in `fixed`, by name.

        Triton compiles the values of `tl.constexpr` arguments into the kernel. So calls with
        different values of such an argument must differ in `variant`. All other arguments must be
        exempt from specialization.
        """
        compiled = self._compiled.get(variant)
        if compiled is None:
            compiled = self._kernel[grid](**self._fixed, **changing, **self._options)
            if compiled is not None:  # Triton's interpreter returns None
                self._compiled[variant] = compiled
            return
        arguments = self._arguments.copy()  # the original would keep the step's tensors alive
        for name, value in changing.items():
            arguments[self._place_of[name]] = value
        compiled[grid](*arguments)
