"""One replica's part of a microbatch's life: Forward in, Forward out, Backward back.

The rule: backward goes before forward, and a microbatch is computed only at its own step's
version. Nothing here waits for the network while there is something to compute.
"""

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import Backward, Forward, Microbatch, Resume
from protocol.records import PlanBody, TensorSpec
from protocol.signing import PeerId
from swarm.core.dataorder import Turns
from swarm.core.ledger import DoubleCount, mask_of
from swarm.core.routing import Inflow, Router, credit_windows
from swarm.core.settlement import needs_of
from swarm.core.step import ReplicaState, Trouble, replicas_of
from swarm.errors import ModelError
from swarm.peer.replica import Replica
from swarm.ports import Buffer

log = logging.getLogger(__name__)

BACKWARD_RANK, FORWARD_RANK = 0, 1
COMPUTING = (ReplicaState.FILLING, ReplicaState.REDUCING, ReplicaState.PREPARED)
"""A stage that is reduced already still computes what other stages lack."""


@dataclass(order=True)
class _Task:
    """Something to compute; ordered as it should be computed."""

    step: int
    rank: int
    index: int
    message: Forward | Backward = field(compare=False)
    payload: Buffer = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Journey:
    """What a replica remembers of a microbatch between its forward and its backward."""

    path: tuple[PeerId, ...]
    weight: int
    accumulate: bool
    """Whether this stage's ledger lacks it."""
    below: bool
    """Whether a stage below lacks it and needs the gradient."""


class Pipeline:
    """The microbatches that a replica has in hand in one epoch."""

    def __init__(self, replica: Replica) -> None:
        self._role = role = replica.role
        self._training = replica.training
        self._executor = replica.executor
        self._links = replica.links
        self._step = replica.step
        self._perform = replica.perform
        body, stage, shape = role.body, role.stage, replica.shape
        self._input = shape.input if stage == 0 else body.stages[stage - 1].output
        self._target = shape.target
        self._output = body.stages[stage].output
        self._most_weight = max(shape.target.elements, replica.training.microbatch_size)
        shares = [feeder.share for feeder in body.feeders]
        self._turns = Turns(shares, replica.training.microbatches_per_step)
        place = role.group.index(role.me.peer)
        windows = [row[place] for row in credit_windows(body, stage)]
        self._inflow = Inflow(dict(zip(_sources(body, stage), windows, strict=True)))
        self._router: Router | None = None
        if not role.is_last:
            self._router = Router(
                replicas_of(body, stage + 1),
                body.wiring[stage + 1][place],
                credit_windows(body, stage + 1)[place],
                phase=place / len(role.group),
            )
        self._tasks: list[_Task] = []
        self._work = trio.Event()
        self._in_hand: set[Microbatch] = set()
        self._journeys: dict[Microbatch, _Journey] = {}
        self._without_credit: list[tuple[Forward, Sequence[Buffer]]] = []
        self._sent_to: dict[Microbatch, PeerId] = {}
        self.samples = 0
        self.computed = 0
        """Microbatches that went forward and backward here."""
        self.compute_seconds = 0.0
        """Of forward and backward of those."""
        self._spent: dict[Microbatch, float] = {}
        """Seconds of what is on its way."""

    @property
    def queue_length(self) -> int:
        """Return how many tasks wait to be computed."""
        return len(self._tasks)

    def resume(self, message: Resume) -> None:
        """The step in hand is taken up again: what of it is to be fed is dealt anew.

        Raises RemoteProtocolError if it names indices that are none of a step's."""
        if self._role.stage > 0:
            return
        try:
            needs = needs_of(message.stages, self._training.microbatches_per_step)
        except ValueError as error:
            raise RemoteProtocolError(f"Resume: {error}") from error
        self._turns.resume(message.step, needs)

    def wake(self) -> None:
        """Look at the queue again: the step has moved on."""
        self._work.set()

    # --- what arrives -------------------------------------------------------------------

    def check_payload(self, message: Forward | Backward) -> None:
        """Raise RemoteProtocolError unless the message carries the tensors of this stage."""
        wanted: tuple[TensorSpec, ...] = ()
        if isinstance(message, Forward) and not message.nonfinite:
            wanted = (self._input, self._target)
        elif not message.nonfinite and self._wants_gradient(message.microbatch):
            wanted = (self._output,)
        if message.tensors != wanted:
            raise RemoteProtocolError(
                f"mb={message.microbatch}: {type(message).__name__} carries "
                f"{_specs(message.tensors)}, stage {self._role.stage} takes {_specs(wanted)}"
            )

    def forward(self, sender: PeerId, message: Forward, payload: Buffer) -> None:
        """Take in a microbatch. Raises RemoteProtocolError if `sender` may not send it now."""
        mb = message.microbatch
        self.check_payload(message)
        self._check_name(mb)
        stage = self._role.stage
        sources = _sources(self._role.body, stage)
        if sender not in sources or len(message.path) != stage + 1 or message.path[-1] != sender:
            raise RemoteProtocolError(f"mb={mb} came by {message.path} from {sender}")
        if not self._step.version <= mb.step <= self._step.version + 1:
            raise RemoteProtocolError(f"mb={mb} arrives at version {self._step.version}")
        if stage == 0:
            feeder = self._turns.feeder_of(mb.step, mb.index)
            if feeder is None or sources[feeder] != sender:
                raise RemoteProtocolError(f"mb={mb} is not for {sender} to feed")
        in_hand = mb.step == self._step.version and self._step.is_working
        if in_hand and self._lacks(message, stage) and mb.index in self._executor.ledger:
            raise RemoteProtocolError(f"mb={mb} is in the ledger already")
        if mb in self._in_hand:
            raise RemoteProtocolError(f"mb={mb} was sent twice, now by {sender}")
        if message.weight > self._most_weight:
            raise RemoteProtocolError(f"mb={mb} weighs {message.weight} of {self._most_weight}")
        self._inflow.take(sender, mb)
        self._in_hand.add(mb)
        self._push(_Task(mb.step, FORWARD_RANK, mb.index, message, payload))

    def backward(self, sender: PeerId, message: Backward, payload: Buffer) -> None:
        """Take in a gradient. Raises RemoteProtocolError if `sender` does not owe it."""
        mb = message.microbatch
        self.check_payload(message)
        if self._sent_to.get(mb) != sender or self._router is None:
            raise RemoteProtocolError(f"mb={mb}: {sender} owes no gradient of it")
        del self._sent_to[mb]
        self._router.give_back(sender, mb.step)
        self._send_waiting()
        if not message.tensors and not self._wants_gradient(mb):
            self._spent.pop(mb, None)
            self._answer(mb, message.nonfinite, None)  # only the credit comes back
        else:
            self._push(_Task(mb.step, BACKWARD_RANK, mb.index, message, payload))

    def _wants_gradient(self, mb: Microbatch) -> bool:
        """Return whether this stage or one below lacks a microbatch that was sent on."""
        journey = self._journeys.get(mb)
        return journey is None or journey.accumulate or journey.below

    @staticmethod
    def _lacks(message: Forward, stage: int) -> bool:
        """Return whether the ledger of `stage` lacks a microbatch."""
        return not message.needs or bool(mask_of(message.needs) >> stage & 1)

    def _check_name(self, mb: Microbatch) -> None:
        if mb.index >= self._training.microbatches_per_step or mb.step >= self._training.steps:
            raise RemoteProtocolError(f"mb={mb} is not in the manifest")

    def _push(self, task: _Task) -> None:
        heapq.heappush(self._tasks, task)
        self._work.set()

    # --- what is computed ------------------------------------------------------------------

    async def run(self) -> None:
        """Compute what is in hand, one task after the other, until cancelled."""
        while True:
            await trio.lowlevel.checkpoint_if_cancelled()  # the executor finishes what is called
            task = self._next()
            if task is None:
                self._work = trio.Event()
                await self._work.wait()
            else:
                before = self._executor.compute_seconds
                await self._compute(task)
                self._note_spent(task, self._executor.compute_seconds - before)

    def _note_spent(self, task: _Task, seconds: float) -> None:
        """Note what a task has taken: of a microbatch that is done here, and went both ways, all
        that it has taken counts."""
        mb, message = task.message.microbatch, task.message
        seconds += self._spent.pop(mb, 0.0)
        if mb in self._journeys:
            self._spent[mb] = seconds
        elif not message.nonfinite:
            self.compute_seconds += seconds
            self.computed += 1

    async def _compute(self, task: _Task) -> None:
        """Compute one task. What the model or the sender did wrong stops training, with a reason;
        nothing has been accumulated then."""
        mb = task.message.microbatch
        try:
            if isinstance(task.message, Forward):
                await self._compute_forward(task.message, task.payload)
            else:
                await self._compute_backward(task.message, task.payload)
        except ModelError as error:
            self._perform([Trouble(f"mb={mb}: {error.what}")])
        except (ValueError, DoubleCount) as error:
            self._perform([Trouble(f"mb={mb} by way of {task.message.path}: {error}")])

    def _next(self) -> _Task | None:
        if self._step.state not in COMPUTING or not self._tasks:
            return None
        first = self._tasks[0]
        # What was flagged here at its forward may come back when the step is over.
        is_late = isinstance(first.message, Backward) and bool(first.message.nonfinite)
        if first.step == self._step.version or (is_late and first.step < self._step.version):
            return heapq.heappop(self._tasks)
        return None

    async def _compute_forward(self, message: Forward, payload: Buffer) -> None:
        mb = message.microbatch
        log.debug("forward mb=%s stage=%d", mb, self._role.stage)
        stage = self._role.stage
        accumulate = self._lacks(message, stage)
        below = any(self._lacks(message, each) for each in range(stage))
        self._journeys[mb] = _Journey(message.path, message.weight, accumulate, below)
        inputs, targets = payload[: self._input.nbytes], payload[self._input.nbytes :]
        if self._role.is_last:
            if message.nonfinite:
                await self._executor.flag(mb, message.nonfinite, message.weight, accumulate)
                self._answer(mb, message.nonfinite, None)
            else:
                turn = await self._executor.turn(mb, inputs, targets, message.weight, accumulate)
                self._answer(mb, turn.nonfinite, turn.gradient)
            return
        nonfinite, output = message.nonfinite, None
        if not nonfinite:
            outcome = await self._executor.forward(mb, inputs, keep=accumulate or below)
            nonfinite, output = outcome.nonfinite, outcome.tensor
        if nonfinite:
            await self._executor.flag(mb, nonfinite, message.weight, accumulate)
            if accumulate:
                self._perform(self._step.accounted(self._executor.ledger))
        onward = Forward(
            fence=self._role.fence,
            microbatch=mb,
            weight=message.weight,
            path=(*message.path, self._role.me.peer),
            tensors=() if nonfinite else (self._output, self._target),
            needs=message.needs,
            nonfinite=nonfinite,
        )
        self._without_credit.append((onward, () if output is None else (output, targets)))
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send on what has been computed, as far as the next stage grants credit."""
        assert self._router is not None
        while self._without_credit:
            message, payloads = self._without_credit[0]
            target = self._router.choose(message.microbatch.step)
            if target is None:
                return
            del self._without_credit[0]
            self._sent_to[message.microbatch] = target
            self._links.post(target, message, payloads)

    async def _compute_backward(self, message: Backward, payload: Buffer) -> None:
        mb = message.microbatch
        log.debug("backward mb=%s stage=%d", mb, self._role.stage)
        journey = self._journeys[mb]
        if not message.nonfinite:
            outcome = await self._executor.backward(mb, payload, journey.weight, journey.accumulate)
            self._answer(mb, outcome.nonfinite, outcome.tensor)
            return
        is_over = mb.step < self._step.version
        flagged_here = journey.accumulate and (is_over or mb.index in self._executor.ledger)
        if not flagged_here:  # who does not accumulate only drops its activations by that
            await self._executor.flag(mb, message.nonfinite, journey.weight, journey.accumulate)
        self._answer(mb, message.nonfinite, None)

    def _answer(self, mb: Microbatch, nonfinite: str, gradient: Buffer | None) -> None:
        """The microbatch is in the ledger: say so, and send its gradient back."""
        journey = self._journeys.pop(mb)
        source = journey.path[-1]
        self._inflow.release(source, mb)
        self._in_hand.remove(mb)
        self.samples += self._training.microbatch_size
        tensors = () if gradient is None or not journey.below else (self._input,)
        backward = Backward(
            fence=self._role.fence,
            microbatch=mb,
            path=journey.path[:-1],
            tensors=tensors,
            nonfinite=nonfinite,
        )
        self._links.post(source, backward, (gradient,) if tensors and gradient is not None else ())
        if journey.accumulate:
            self._perform(self._step.accounted(self._executor.ledger))


def _specs(specs: Sequence[TensorSpec]) -> str:
    return "[" + ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in specs) + "]"


def _sources(body: PlanBody, stage: int) -> Sequence[PeerId]:
    """Who sends to a stage, in the order of the wiring."""
    if stage == 0:
        return [feeder.member.peer for feeder in body.feeders]
    return replicas_of(body, stage - 1)
