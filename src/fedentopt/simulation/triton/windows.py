"""How the stacked convolutions are cut into matrix products: the geometry that their kernels share.

Convolution and 2x2 pooling are one product. A row is a block of `px` neighbouring pooled pixels of one image; its
entries are the input window under the block, (k + 1) x (2 px + k - 1) pixels of every input channel. A column is
(pooled pixel of the block, one of its four positions, output channel). The matrix between them holds the filter
shifted to each position, zeros elsewhere. It wastes some arithmetic on zeros and spares most of im2col's copies, which
is what a tensor core wants: the max over positions then happens inside a thread's own accumulators.
"""

from __future__ import annotations

from dataclasses import dataclass

# The expanded filters stay in a multiprocessor's shared memory: forward's, and the input gradient's, which are padded
# more and held twice where products are split for accuracy.
MOST_MATRIX_BYTES = 96 * 1024
MOST_INPUT_GRAD_BYTES = 150 * 1024

WAVE = 528  # programs that an H200 runs at once: four on each of 132 multiprocessors


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and at least `least`."""
    return max(least, 1 << (value - 1).bit_length())


@dataclass(frozen=True)
class Windows:
    """Sizes of one convolution layer as a product of windows with expanded filters."""

    in_channels: int
    out_channels: int
    kernel: int
    height: int
    width: int
    block: int | None = None

    @property
    def pooled(self) -> tuple[int, int]:
        return (self.height - self.kernel + 1) // 2, (self.width - self.kernel + 1) // 2

    @property
    def px(self) -> int:
        """Pooled pixels a block: two where the windows then start at multiples of 16 bytes, else one."""
        if self.block is not None:
            return self.block
        aligned = self.width % 4 == 0 and (self.kernel + 3) % 4 == 0 and self.pooled[1] % 2 == 0
        return 2 if aligned and self._matrix_bytes(2) <= MOST_MATRIX_BYTES else 1

    @property
    def vector(self) -> int:
        """Neighbouring pixels a thread reads at once."""
        if self.px == 2:
            return 4
        return 2 if self.kernel % 2 == 1 and self.width % 2 == 0 else 1

    @property
    def padded_out(self) -> int:
        return power_of_two(self.out_channels, 8)

    @property
    def columns(self) -> int:
        return self.px * 4 * self.padded_out

    @property
    def entries(self) -> int:
        """Entries of a row: pixels of a window over all input channels."""
        return self._entries(self.px)

    @property
    def blocks(self) -> int:
        """Rows an image gives."""
        return self.pooled[0] * self.pooled[1] // self.px

    def fits(self, copies: int = 1) -> bool:
        """Whether the expanded filters fit in shared memory, forward and backward."""
        taps = (self.kernel // 2 + 1) ** 2 * 16 * power_of_two(self.in_channels, 4) * self.padded_out
        return self._matrix_bytes(1) <= MOST_MATRIX_BYTES and taps * 4 * copies <= MOST_INPUT_GRAD_BYTES

    def _entries(self, px: int) -> int:
        return self.in_channels * (self.kernel + 1) * (2 * px + self.kernel - 1)

    def _matrix_bytes(self, px: int) -> int:
        return self._entries(px) * px * 4 * self.padded_out * 4
