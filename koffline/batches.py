"""Input of the replica engine: a table of rows, and the rows of each mini-batch.

One table serves value functions of states and of actions alike:

    value_i      = Σ_o readout_io · net(inputs_i)_o
    next_value_i = Σ_o next_readout_io · net(next_inputs_i)_o
    residual_i   = reward_i + discount_i · next_value_i − value_i

V(s): one output, no readouts. Q(s, a), discrete a: n outputs, readout the one-hot
logged action, next_readout the policy's probabilities at s'. Q(s, a), continuous a:
inputs (s, a), next inputs (s', a') with m actions drawn beforehand from the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError, DataError
from koffline.kernels import Gaussian, Kernel
from koffline.objectives import MemoryLoss
from koffline.replicas import ReplicaPlan, StepBuffers

_MIX = (1 << 63) - 1
_DRAW_BLOCK = 64  # number of steps whose continuations are drawn together
# copies of a row of mean weight in the sample that mini-batches draw from
_FINENESS = 16
_MOST_COPIES = 2_000_000  # most rows in that sample
_LEAST_EXPONENT = -120.0  # least exponent of two: smaller powers are subnormal and slow


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a table, or of a mini-batch for every replica or every group (leading
    axis).
    """

    inputs: Float[Tensor, "*replica row input"]
    # of a mini-batch whose objective reads no next rows: none, (R, B, 0)
    next_inputs: Float[Tensor, "*replica row *draw input"]
    rewards: Float[Tensor, "*replica row"]
    discounts: Float[Tensor, "*replica row"]  # γ^interval, zero after a termination
    readout: Float[Tensor, "*replica row output"] | None = None
    next_readout: Float[Tensor, "*replica row output"] | None = None


@dataclass(frozen=True, eq=False)
class Table(Batch):
    """Rows as tensors of one float dtype on one device; checked once, raising
    DataError.

    next_inputs: (N, d), or (N, m, d) for m drawn next actions per row. kernel_inputs:
    inputs of the kernel.
    """

    kernel_inputs: Float[Tensor, "row column"] | None = None

    def __post_init__(self) -> None:
        rows = self.inputs.shape[0]
        width = self.inputs.shape[-1]
        for name, ranks in (("inputs", (2,)), ("next_inputs", (2, 3))):
            shape = tuple(getattr(self, name).shape)
            if len(shape) not in ranks or shape[-1] != width or not rows:
                raise DataError(
                    f"{name} has shape {shape}; give (N, [m,] {width}) with N > 0"
                )
        if (self.readout is None) != (self.next_readout is None):
            raise DataError(
                "readout and next_readout come together; give both or neither"
            )
        form = self.inputs.dtype, self.inputs.device
        for name, column in self.columns():
            if len(column) != rows:
                raise DataError(
                    f"{name} has {len(column)} rows, inputs {rows}; give equal lengths"
                )
            if (column.dtype, column.device) != form:
                raise DataError(
                    f"{name} is {column.dtype} on {column.device}; convert it to {form}"
                    " with .to"
                )
            if not bool(torch.isfinite(column).all()):
                raise DataError(
                    f"{name} holds NaN or infinite numbers; clean the log first"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def draws(self) -> int:
        """Number m of drawn next inputs per row."""
        if self.next_inputs.ndim == 2:
            return 1
        return self.next_inputs.shape[1]

    @property
    def compared(self) -> Tensor:
        """Inputs of the kernel (N, k). Raises ConfigError if the table has none."""
        if self.kernel_inputs is None:
            raise ConfigError(
                "the objective has a kernel, the table no kernel_inputs; give them"
            )
        return self.kernel_inputs

    def columns(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of each column that is not None."""
        pairs = [(item.name, getattr(self, item.name)) for item in fields(self)]
        return [(name, column) for name, column in pairs if column is not None]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Table:
        """The table on another device or in another precision; the same object if
        nothing changes.
        """
        moved = {
            name: column.to(device, dtype or column.dtype)
            for name, column in self.columns()
        }
        return replace(self, **moved)

    def select(self, rows: Tensor) -> Table:
        """The table of the chosen rows."""
        return replace(self, **{name: column[rows] for name, column in self.columns()})


class BatchSchedule:
    """Row numbers of every mini-batch of every group: a function of seed and step, so
    resuming is free.

    An epoch is ``rows // batch_size`` mini-batches from a new permutation; the
    remainder is left out. A row set smaller than a mini-batch is filled up with further
    permutations.
    """

    def __init__(
        self,
        plan: ReplicaPlan,
        rows: int,
        batch_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._batch_size = batch_size
        self._device = device
        self._seeds = [seed for seed, _ in plan.groups]
        whole = torch.arange(rows)
        self._sets: list[Tensor] = []  # row numbers of each group
        for _, row_set in plan.groups:
            if row_set >= 0:
                self._sets.append(plan.row_sets[row_set].cpu().long())
            else:
                self._sets.append(whole)
        self._lengths = [max(1, len(chosen) // batch_size) for chosen in self._sets]
        self.steps_per_epoch = max(1, rows // batch_size)
        self._counts = torch.tensor(self._lengths, device=device)[:, None]
        self._places = torch.arange(batch_size, device=device)
        self._epochs = [-1] * len(self._seeds)
        shape = len(self._seeds), max(self._lengths) * batch_size
        self._rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self._draw_block = (-1, 0)
        self._picks = self._rows

    def rows(self, step: int) -> Tensor:
        """Row numbers (G, B) of the mini-batches of `step`."""
        self._refill(step)
        return self._rows.gather(
            1, step % self._counts * self._batch_size + self._places
        )

    def _refill(self, step: int) -> None:
        """Draw new permutations for every group whose epoch begins at `step`."""
        stale = [
            g
            for g, length in enumerate(self._lengths)
            if self._epochs[g] != step // length
        ]
        for group in stale:
            epoch = step // self._lengths[group]
            needed = self._lengths[group] * self._batch_size
            chosen = self._sets[group]
            generator = _generator(self._seeds[group], epoch, 0)
            repeats = range(-(-needed // len(chosen)))
            order = torch.cat(
                [torch.randperm(len(chosen), generator=generator) for _ in repeats]
            )
            self._epochs[group] = epoch
            self._rows[group, :needed] = chosen[order[:needed]].to(self._device)

    def draws(self, step: int, draws: int) -> Tensor:
        """Number (G, B) of the drawn next input, out of `draws`, for each row of the
        mini-batches.
        """
        block, place = divmod(step, _DRAW_BLOCK)
        if (block, draws) != self._draw_block:
            shape = (_DRAW_BLOCK, self._batch_size)
            picks = [
                torch.randint(draws, shape, generator=_generator(s, block, 1))
                for s in self._seeds
            ]
            self._draw_block = (block, draws)
            self._picks = torch.stack(picks, dim=1).to(self._device)
        return self._picks[place]


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A table's columns side by side, (N, C) in ``columns``, so that a mini-batch is
    one gather (two with drawn next inputs).

    ``widths``: how many columns each part has. ``continuations``: the drawn next inputs
    (N · ``draws``, d), None for one of each row, which is among the columns.
    ``is_wide``: whether kernel values of rows of the table would be subnormal in single
    precision.
    """

    columns: Float[Tensor, "row column"]
    widths: dict[str, int]
    continuations: Float[Tensor, "draw input"] | None
    draws: int
    is_wide: bool

    @classmethod
    def of(
        cls,
        table: Table,
        kernel: Kernel | MemoryLoss | None,
        reads_next: bool = True,
    ) -> PackedRows:
        """The packed rows of a table, with what the kernel reads of them.

        reads_next: whether the objective reads next rows; if not, mini-batches have
        none.
        """
        is_wide = False
        parts = {
            name: column for name, column in table.columns() if name != "kernel_inputs"
        }
        parts |= {
            "rewards": table.rewards[:, None],
            "discounts": table.discounts[:, None],
        }
        parts["next_inputs"] = table.next_inputs.flatten(1)
        continuations = None
        draws = 1
        if not reads_next:
            parts["next_inputs"] = table.inputs[:, :0]
            parts.pop("next_readout", None)
        elif table.draws > 1:
            draws = table.draws
            del parts["next_inputs"]
            continuations = table.next_inputs.flatten(0, 1)
        # columns whose product is the kernel's exponent, computed once
        if isinstance(kernel, Gaussian):
            compared = table.compared
            parts["left"], parts["right"] = kernel.exponent_columns(compared)
            corners = torch.stack((compared.amin(dim=0), compared.amax(dim=0)))
            low, high = kernel.exponent_columns(corners)
            # Kernel values of the farthest corners would be
            # subnormal in single precision.
            is_wide = float((low[0] * high[1]).sum()) < _LEAST_EXPONENT
        elif kernel is not None:
            parts["kernel_inputs"] = table.compared
        return cls(
            columns=torch.cat(list(parts.values()), dim=1).contiguous(),
            widths={name: part.shape[1] for name, part in parts.items()},
            continuations=continuations,
            draws=draws,
            is_wide=is_wide,
        )


class BatchSource:
    """The mini-batches of every step, and their Gram matrices (or features) if there is
    a kernel.

    packed: the table's rows, if they have been packed for this kernel before.
    """

    def __init__(
        self,
        table: Table,
        kernel: Kernel | MemoryLoss | None,
        plan: ReplicaPlan,
        schedule: BatchSchedule,
        packed: PackedRows | None = None,
    ) -> None:
        if packed is None:
            packed = PackedRows.of(table, kernel)
        self._schedule = schedule
        self._kernel = kernel
        self._draws = packed.draws
        self._workspace = StepBuffers()
        self._wide = packed.is_wide
        self._continuations = packed.continuations
        self._widths = packed.widths
        self._columns = packed.columns
        groups = len(plan.groups)
        self._group_of: Tensor | None = None
        self._gram_of: Tensor | None = None
        if groups < len(plan):
            self._group_of = torch.tensor(plan.group_of, device=table.inputs.device)
            # One gram serves its replicas as a view when groups
            # follow each other in equal sizes.
            in_order = tuple(
                group for group in range(groups) for _ in range(len(plan) // groups)
            )
            if in_order != plan.group_of:
                self._gram_of = self._group_of

    def batch(self, step: int) -> tuple[Batch, Tensor | None]:
        """Rows of every replica (R, B, …) and Gram matrices (G, B, B), which the next
        call overwrites.
        """
        return self.read(*self.numbers(step))

    def numbers(self, step: int) -> tuple[Tensor, ...]:
        """Row numbers (G, B) of the mini-batches of `step`, and the numbers of drawn
        next inputs, if any.
        """
        rows = self._schedule.rows(step)
        if self._draws == 1:
            return (rows,)
        return rows, rows * self._draws + self._schedule.draws(step, self._draws)

    def read(
        self, rows: Tensor, continuations: Tensor | None = None
    ) -> tuple[Batch, Tensor | None]:
        """The mini-batches with these row numbers."""
        packed = _rows_of(self._columns, rows)  # (G, B, C)
        gram = None
        if self._kernel is not None:
            gram = self._gram(self._split(packed))
        part = self._split(_selected(packed, self._group_of))
        if continuations is not None:
            assert self._continuations is not None
            part["next_inputs"] = _rows_of(
                self._continuations, _selected(continuations, self._group_of)
            )
        batch = Batch(
            inputs=part["inputs"],
            next_inputs=part["next_inputs"],
            rewards=part["rewards"].squeeze(-1),
            discounts=part["discounts"].squeeze(-1),
            readout=part.get("readout"),
            next_readout=part.get("next_readout"),
        )
        return batch, gram

    def _split(self, packed: Tensor) -> dict[str, Tensor]:
        """The columns of packed rows (…, C) by name."""
        columns = packed.split(list(self._widths.values()), dim=-1)
        return dict(zip(self._widths, columns, strict=True))

    def _gram(self, part: dict[str, Tensor]) -> Tensor:
        if isinstance(self._kernel, Gaussian):
            left = part["left"]
            right = part["right"]
            groups, rows = left.shape[:2]
            buffer = self._workspace.take("gram", (groups, rows, rows), left)
            exponent = torch.bmm(left, right.mT, out=buffer)
            if self._wide:
                exponent.clamp_(min=_LEAST_EXPONENT)
            gram = exponent.exp2_()
            # exact in spite of the rounded exponent
            gram.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        else:
            assert self._kernel is not None
            gram = self._kernel.gram(part["kernel_inputs"])
        return _selected(gram, self._gram_of)


def rows_by_weight(
    weights: Float[Tensor, " row"], generator: torch.Generator
) -> Tensor:
    """Row indices for mini-batches, each repeated in proportion to its weight.

    Integer weights are kept exactly. Other weights are scaled up, so that small weights
    stay distinct, and rounded at random, which is unbiased and independent of the order
    of the rows.
    """
    repeats = weights.round()
    if not torch.equal(repeats, weights):
        copies = min(_FINENESS, max(1, _MOST_COPIES // len(weights)))
        scaled = weights * (copies / weights.mean())
        repeats = (
            scaled + torch.rand(len(weights), generator=generator, dtype=scaled.dtype)
        ).floor()
    return torch.repeat_interleave(torch.arange(len(weights)), repeats.long())


def _rows_of(columns: Tensor, rows: Tensor) -> Tensor:
    """Rows (G, B, C) of columns (N, C)."""
    return columns.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _selected(groups: Tensor, group_of: Tensor | None) -> Tensor:
    """The group's array (G, …) for each replica (R, …); None: one group per replica."""
    if group_of is None:
        return groups
    return groups.index_select(0, group_of)


def _generator(seed: int, number: int, stream: int) -> torch.Generator:
    """A generator for (seed, number, stream); distinct triples give unrelated streams
    (splitmix64).
    """
    state = (
        int(seed) * 0x9E3779B97F4A7C15
        + number * 0xD1B54A32D192ED03
        + stream * 0x8CB92BA72F3D8DD7
    ) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> shift)) * factor % 2**64
    return torch.Generator().manual_seed((state ^ (state >> 31)) & _MIX)
