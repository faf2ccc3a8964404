"""What a schedule is made for: layers, peers, links and terms; and the assignment that answers it.

The rule: a problem is checked when it is made, so whoever holds one can compute with it. Peers are
named by their index in order of id. The same text form serves files, tests and reviews.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

MAX_SECONDS = 1e9
MAX_BYTES = 2.0**63


@dataclass(frozen=True)
class Layer:
    """One layer at the manifest's microbatch shape, on a peer of speed 1."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    output_bytes: int
    """What goes on if the model is cut after this layer, before compression."""
    activation_bytes: int = 0
    """Kept between forward and backward of one microbatch."""


@dataclass(frozen=True)
class Peer:
    """What one peer can do."""

    id: str
    speed: float
    """Relative: a layer takes its seconds divided by this."""
    memory_bytes: int
    uplink: float
    """Bytes per second, to all others together."""
    downlink: float
    """Bytes per second, from all others together."""
    place: str = ""
    """Region or host label; empty if unknown."""
    has_data: bool = True


@dataclass(frozen=True, init=False, eq=False)
class Links:
    """Every directed pair; row: sender, column: receiver. The diagonal does not matter.

    Arrays that nobody can write to; equal, and hashed, by what they hold.
    """

    bandwidth: Floats
    """Bytes per second, (n, n); 0 where nothing gets through."""
    latency_seconds: Floats
    """One way, (n, n)."""

    def __init__(self, bandwidth: ArrayLike, latency_seconds: ArrayLike) -> None:
        object.__setattr__(self, "bandwidth", _matrix(bandwidth))
        object.__setattr__(self, "latency_seconds", _matrix(latency_seconds))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Links) and (
            np.array_equal(self.bandwidth, other.bandwidth)
            and np.array_equal(self.latency_seconds, other.latency_seconds)
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.bandwidth.tobytes(), self.latency_seconds.tobytes()))


@dataclass(frozen=True)
class Terms:
    """What the manifest says."""

    microbatches_per_step: int
    min_replicas: int = 1
    max_replicas: int = 0
    """Of a stage; 0: no limit."""
    max_stages: int = 0
    """0: no limit."""
    stages: int = 0
    """Exactly so many stages; 0: free."""
    cuts: tuple[int, ...] = ()
    """First layer of every stage but the first; empty if the swarm may choose."""
    input_bytes: int = 0
    """Of a microbatch, on the way from its feeder to stage 0."""
    target_bytes: int = 0
    """Of a microbatch; they travel down the pipeline with the activations."""
    forward_ratio: float = 1.0
    """Bytes on the wire for a byte of activations; targets and inputs are never compressed."""
    backward_ratio: float = 1.0
    """The same for gradients of activations."""
    reduction_ratio: float = 1.0
    """Bytes on the wire for a byte of parameters in the reduction."""
    state_ratio: float = 6.0
    """Bytes of memory for a byte of parameters: weights, moments, gradients, accumulator."""
    moved_ratio: float = 3.0
    """Bytes that whoever fetches a state receives for a byte of parameters: weights, moments."""


@dataclass(frozen=True)
class Holding:
    """A peer holds layers [first, last), `lag` versions behind the newest."""

    peer: int
    first: int
    last: int
    lag: int = 0


@dataclass(frozen=True)
class Standby:
    """A peer without work, and why."""

    peer: int
    reason: str


@dataclass(frozen=True)
class Assignment:
    """Who does what; peers by index. The wiring is computed from it (wiring.py)."""

    ranges: tuple[tuple[int, int], ...]
    """Layers [first, last) of every stage."""
    groups: tuple[tuple[int, ...], ...]
    """Replicas of every stage, ascending."""
    feeders: tuple[int, ...]
    """Ascending; some of them may be given no share."""
    standby: tuple[Standby, ...] = ()
    """Everybody else, ascending."""


@dataclass(frozen=True)
class Problem:
    """All that a schedule depends on. Raises ValueError if it makes no sense.

    A key for caches: it is hashed once, and equal to whatever says the same."""

    layers: tuple[Layer, ...]
    peers: tuple[Peer, ...]
    """In order of id."""
    links: Links
    terms: Terms
    current: Assignment | None = None
    """What the peers do now; None before the first plan."""
    holdings: tuple[Holding, ...] = ()
    """Who holds what; layers that nobody holds are made or read from disk, at no price."""
    horizon_seconds: float = 3600.0
    """How long a plan is expected to last."""

    def __post_init__(self) -> None:
        _check(self)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        parts = (self.layers, self.peers, self.links, self.terms)
        return hash((*parts, self.current, self.holdings, self.horizon_seconds))

    # --- arrays, by peer -------------------------------------------------------------------------

    @cached_property
    def speed(self) -> Floats:
        """Return relative speeds, (n,)."""
        return np.array([peer.speed for peer in self.peers])

    @cached_property
    def uplink(self) -> Floats:
        """Return bytes per second that each peer sends at most, (n,)."""
        return np.array([peer.uplink for peer in self.peers])

    @cached_property
    def downlink(self) -> Floats:
        """Return bytes per second that each peer receives at most, (n,)."""
        return np.array([peer.downlink for peer in self.peers])

    @cached_property
    def bandwidth(self) -> Floats:
        """Return what one transfer alone gets from i to j, bytes per second, (n, n).

        The least of link, uplink and downlink; infinite on the diagonal."""
        made = np.minimum(self.link, np.minimum(self.uplink[:, None], self.downlink[None, :]))
        np.fill_diagonal(made, np.inf)
        return made

    @cached_property
    def link(self) -> Floats:
        """Return bytes per second of the links alone, (n, n); infinite on the diagonal."""
        made = self.links.bandwidth.copy()
        np.fill_diagonal(made, np.inf)
        return made

    @property
    def latency(self) -> Floats:
        """Return one-way seconds, (n, n); 0 on the diagonal."""
        return self.links.latency_seconds

    @cached_property
    def memory(self) -> Floats:
        """Return bytes of memory, (n,)."""
        return np.array([peer.memory_bytes for peer in self.peers], dtype=np.float64)

    @cached_property
    def data_holders(self) -> tuple[int, ...]:
        """Return the peers that can feed."""
        return tuple(i for i, peer in enumerate(self.peers) if peer.has_data)

    @cached_property
    def lacking(self) -> tuple[Floats, Floats]:
        """Return bytes that each peer lacks of the state of the layers before each cut, and how
        long it fetches them, (n, layers + 1) each: differences give those of a stage.

        Each layer comes from whoever has it and has the best way to this peer, one after the other.
        One version behind, the reduced gradient is enough. What nobody holds, or nobody who can be
        reached, comes from disk and costs nothing; so does everything if nobody holds anything.
        """
        lags = np.full((len(self.peers), len(self.layers)), 2)
        for each in self.holdings:
            held = lags[each.peer, each.first : each.last]
            np.minimum(held, each.lag, out=held)
        ways = np.where(np.isinf(self.bandwidth), 0.0, self.bandwidth)
        best = np.stack([ways[column == 0].max(axis=0, initial=0.0) for column in lags.T], axis=1)
        ratios = np.array([0.0, self.terms.reduction_ratio, self.terms.moved_ratio])[lags]
        size = np.where(best > 0, ratios * [layer.parameter_bytes for layer in self.layers], 0.0)
        seconds = np.divide(size, best, out=np.zeros_like(size), where=best > 0)
        edge = np.zeros((len(self.peers), 1))
        return (
            np.cumsum(np.hstack([edge, size]), axis=1),
            np.cumsum(np.hstack([edge, seconds]), axis=1),
        )

    # --- sums over layers ------------------------------------------------------------------------

    @cached_property
    def _prefix(self) -> tuple[list[float], list[float], list[int], list[int]]:
        forward, backward, parameters, activations = [0.0], [0.0], [0], [0]
        for layer in self.layers:
            forward.append(forward[-1] + layer.forward_seconds)
            backward.append(backward[-1] + layer.backward_seconds)
            parameters.append(parameters[-1] + layer.parameter_bytes)
            activations.append(activations[-1] + layer.activation_bytes)
        return forward, backward, parameters, activations

    @cached_property
    def prefix(self) -> Floats:
        """Return sums over the layers before each cut, (4, layers + 1): forward seconds, backward
        seconds, parameter bytes, activation bytes."""
        return np.array(self._prefix, dtype=np.float64)

    def seconds(self, first: int, last: int) -> float:
        """Return forward and backward seconds of layers [first, last) at speed 1."""
        forward, backward, _, _ = self._prefix
        return forward[last] - forward[first] + backward[last] - backward[first]

    def backward_seconds(self, first: int, last: int) -> float:
        """Return backward seconds of layers [first, last) at speed 1."""
        backward = self._prefix[1]
        return backward[last] - backward[first]

    def parameter_bytes(self, first: int, last: int) -> int:
        """Return bytes of the parameters of layers [first, last)."""
        parameters = self._prefix[2]
        return parameters[last] - parameters[first]

    def memory_bytes(self, first: int, last: int, stage: int, stages: int) -> float:
        """Return what a replica of `stage` (of `stages`) with layers [first, last) needs.

        Its state, and the activations of `stages - stage + 1` microbatches: 1F1B keeps one for
        every stage from here on, and one more hides the way to the neighbours
        (routing.credit_window).
        """
        activations = self._prefix[3]
        kept = (activations[last] - activations[first]) * (stages - stage + 1)
        return self.terms.state_ratio * self.parameter_bytes(first, last) + kept

    def forward_bytes(self, cut: int) -> float:
        """Return bytes of one Forward over the cut before layer `cut`; 0: from the feeder."""
        terms = self.terms
        if cut == 0:
            return float(terms.input_bytes + terms.target_bytes)
        return self.layers[cut - 1].output_bytes * terms.forward_ratio + terms.target_bytes

    def backward_bytes(self, cut: int) -> float:
        """Return bytes of one Backward over the same cut; what goes to a feeder is empty."""
        return self.layers[cut - 1].output_bytes * self.terms.backward_ratio if cut else 0.0

    @cached_property
    def cut_bytes(self) -> Floats:
        """Return bytes of one microbatch over each cut, there and back, (layers + 1,)."""
        cuts = range(len(self.layers) + 1)
        return np.array([self.forward_bytes(cut) + self.backward_bytes(cut) for cut in cuts])

    @property
    def replica_limit(self) -> int:
        """Return how many replicas a stage has at most."""
        return self.terms.max_replicas or len(self.peers)


def check_assignment(problem: Problem, assignment: Assignment) -> None:
    """Raise ValueError, with the figures, unless the assignment is one of this problem's: every
    layer in one stage, every peer in one place, memory, replicas and cuts as the terms say."""
    count, stages = len(problem.peers), len(assignment.ranges)
    _check_form(assignment, count, len(problem.layers))
    terms = problem.terms
    cuts = tuple(first for first, _ in assignment.ranges[1:])
    if terms.max_stages and stages > terms.max_stages:
        raise ValueError(f"{stages} stages are more than {terms.max_stages}")
    if terms.stages and stages != terms.stages:
        raise ValueError(f"{stages} stages are not the manifest's {terms.stages}")
    if terms.cuts and cuts != terms.cuts:
        raise ValueError(f"cuts {list(cuts)} are not the manifest's {list(terms.cuts)}")
    pairs = zip(assignment.ranges, assignment.groups, strict=True)
    for stage, ((first, last), group) in enumerate(pairs):
        if not terms.min_replicas <= len(group) <= problem.replica_limit:
            raise ValueError(
                f"stage {stage} has {len(group)} replicas, "
                f"not {terms.min_replicas} to {problem.replica_limit}"
            )
        needed = problem.memory_bytes(first, last, stage, stages)
        for peer in group:
            if problem.peers[peer].memory_bytes < needed:
                raise ValueError(
                    f"stage {stage} needs {needed:.0f} bytes, {problem.peers[peer].id} has "
                    f"{problem.peers[peer].memory_bytes}"
                )
    for peer in assignment.feeders:
        if not problem.peers[peer].has_data:
            raise ValueError(f"feeder {problem.peers[peer].id} has no data")


def is_assignment(problem: Problem, assignment: Assignment) -> bool:
    """Whether `check_assignment` has nothing against it."""
    try:
        check_assignment(problem, assignment)
    except ValueError:
        return False
    return True


def problem_to_json(problem: Problem) -> bytes:
    """Return the problem as a JSON object."""
    return msgspec.json.encode(problem, enc_hook=_rows_of)


def problem_from_json(text: bytes | str) -> Problem:
    """Return the problem that a JSON object describes.

    Raises ValueError, with the place, if it is none or makes no sense."""
    try:
        return msgspec.json.decode(text, type=Problem, dec_hook=_decoded)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def _matrix(rows: ArrayLike) -> Floats:
    """Return a matrix of its own, with 0 on the diagonal if it is square, that stays as it is.

    Raises ValueError if it is none."""
    made = np.array(rows, dtype=np.float64) + 0.0  # -0.0 equals 0.0 and is hashed as another
    if made.ndim == 2 and made.shape[0] == made.shape[1]:
        np.fill_diagonal(made, 0.0)
    made.flags.writeable = False
    return made


def _rows_of(matrix: Any) -> Any:
    if not isinstance(matrix, np.ndarray):
        raise NotImplementedError(f"a problem holds no {type(matrix)}")
    return matrix.tolist()


def _decoded(_: type, rows: Any) -> Any:
    return _matrix(msgspec.convert(rows, list[list[float]]))


# --- checks --------------------------------------------------------------------------------------


def _check(problem: Problem) -> None:
    count, layers = len(problem.peers), len(problem.layers)
    if not layers or not count:
        raise ValueError(f"{layers} layers and {count} peers make no schedule")
    for number, layer in enumerate(problem.layers):
        _check_layer(number, layer)
    for peer in problem.peers:
        _check_peer(peer)
    ids = [peer.id for peer in problem.peers]
    if any(a >= b for a, b in pairwise(ids)):
        raise ValueError("peers are not in order of id, or one is there twice")
    _check_square("links.bandwidth", problem.links.bandwidth, count, MAX_BYTES)
    _check_square("links.latency_seconds", problem.links.latency_seconds, count, MAX_SECONDS)
    _check_terms(problem.terms, layers)
    _within("horizon_seconds", problem.horizon_seconds, 1e-3, 1e12)
    for holding in problem.holdings:
        if not (0 <= holding.peer < count and 0 <= holding.first < holding.last <= layers):
            raise ValueError(f"holding {holding} names no peer or no layers")
        if holding.lag < 0:
            raise ValueError(f"holding {holding} is ahead of the newest version")
    if problem.current is not None:
        _check_form(problem.current, count, layers)


def _check_layer(number: int, layer: Layer) -> None:
    where = f"layers[{number}]"
    _within(f"{where}.forward_seconds", layer.forward_seconds, 0, MAX_SECONDS)
    _within(f"{where}.backward_seconds", layer.backward_seconds, 0, MAX_SECONDS)
    _within(f"{where}.parameter_bytes", layer.parameter_bytes, 0, MAX_BYTES)
    _within(f"{where}.output_bytes", layer.output_bytes, 0, MAX_BYTES)
    _within(f"{where}.activation_bytes", layer.activation_bytes, 0, MAX_BYTES)


def _check_peer(peer: Peer) -> None:
    where = f"peer {peer.id!r}"
    _within(f"{where}: speed", peer.speed, 1e-9, 1e9)
    _within(f"{where}: memory_bytes", peer.memory_bytes, 0, MAX_BYTES)
    _within(f"{where}: uplink", peer.uplink, 1e-3, MAX_BYTES)
    _within(f"{where}: downlink", peer.downlink, 1e-3, MAX_BYTES)


def _check_terms(terms: Terms, layers: int) -> None:
    _within("terms.microbatches_per_step", terms.microbatches_per_step, 1, 65536)
    _within("terms.min_replicas", terms.min_replicas, 1, MAX_BYTES)
    if terms.max_replicas and terms.max_replicas < terms.min_replicas:
        raise ValueError(f"max_replicas {terms.max_replicas} < min_replicas {terms.min_replicas}")
    edges = [0, *terms.cuts, layers]
    if any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"terms.cuts {list(terms.cuts)} do not cut {layers} layers into stages")
    for name in ("input_bytes", "target_bytes", "max_replicas", "max_stages"):
        _within(f"terms.{name}", getattr(terms, name), 0, MAX_BYTES)
    _within("terms.stages", terms.stages, 0, min(layers, terms.max_stages or layers))
    if terms.stages and terms.cuts and terms.stages != len(terms.cuts) + 1:
        raise ValueError(f"terms.cuts {list(terms.cuts)} do not make {terms.stages} stages")
    for name in ("forward", "backward", "reduction", "state", "moved"):
        _within(f"terms.{name}_ratio", getattr(terms, f"{name}_ratio"), 0, 1e3)


def _check_square(name: str, values: Floats, count: int, most: float) -> None:
    if values.shape != (count, count):
        raise ValueError(f"{name} is not {count} rows of {count}")
    wrong = np.argwhere(~((values >= 0) & (values <= most)))
    for i, j in wrong.tolist():
        _within(f"{name}[{i}][{j}]", float(values[i, j]), 0, most)


def _check_form(assignment: Assignment, count: int, layers: int) -> None:
    edges = [0, *(last for _, last in assignment.ranges)]
    if edges[-1] != layers or any(
        first != edge or first >= last
        for edge, (first, last) in zip(edges, assignment.ranges, strict=False)
    ):
        raise ValueError(f"ranges {list(assignment.ranges)} do not cover {layers} layers once")
    if len(assignment.groups) != len(assignment.ranges) or not all(assignment.groups):
        raise ValueError("a stage has no replicas")
    standby = tuple(each.peer for each in assignment.standby)
    for group in (*assignment.groups, assignment.feeders, standby):
        if list(group) != sorted(set(group)):
            raise ValueError(f"peers {list(group)} are not ascending")
    everybody = sorted([peer for group in (*assignment.groups, standby) for peer in group])
    if everybody != list(range(count)):
        raise ValueError(f"peers {everybody} are not each of {count} once")
    if not assignment.feeders or not 0 <= assignment.feeders[0] <= assignment.feeders[-1] < count:
        raise ValueError(f"feeders {list(assignment.feeders)} are nobody")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} is {value}, not {least:g} to {most:g}")
