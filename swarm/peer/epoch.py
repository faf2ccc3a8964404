"""One active plan at work on this peer: activate, report, resume, then step after step.

It wires the parts that this peer's roles ask for (pipeline, reducer, feeder, coordinators) and
performs their effects. The rule: everything here carries the plan's fence and dies with it.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Backward,
    Commit,
    Durable,
    Fence,
    Forward,
    GatherShard,
    Held,
    LedgerReport,
    Message,
    Prepared,
    ReduceShard,
    Report,
    Resume,
    StartReduction,
    Totals,
)
from protocol.messages import (
    Training as TrainingMessage,
)
from protocol.records import Member, Training, clip
from protocol.signing import PeerId
from swarm.core.agreement import Plan
from swarm.core.coordinators import GroupCoordinator, StepCoordinator
from swarm.core.model import ModelShape
from swarm.core.reduction import buckets
from swarm.core.step import (
    Apply,
    Effect,
    Reduce,
    ReplicaState,
    ReplicaStep,
    Role,
    Send,
    Trouble,
    ranges_of_stages,
    role_of,
    step_coordinator_of,
)
from swarm.peer.feeder import Feeder
from swarm.peer.links import Links
from swarm.peer.pipeline import Pipeline
from swarm.peer.reducer import Reducer
from swarm.peer.replica import Replica
from swarm.ports import Buffer, Checkpoints, DataSource, StageExecutor

log = logging.getLogger(__name__)

MAX_LOSSES = 1000


class Epoch:
    """What this peer does by one plan."""

    def __init__(
        self,
        *,
        plan: Plan,
        me: Member,
        training: Training,
        shape: ModelShape,
        executor: StageExecutor,
        source: DataSource | None,
        links: Links,
        checkpoints: Checkpoints,
        on_trouble: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.fence = Fence(plan.header.generation, plan.header.epoch, me.boot)
        self.role = role_of(plan.body, me, self.fence)
        self.losses: deque[tuple[int, float]] = deque(maxlen=MAX_LOSSES)
        """(step, mean loss) of the last steps that this peer committed."""
        self._training = training
        self._shape = shape
        self._executor = executor
        self._links = links
        self._checkpoints = checkpoints
        self._on_trouble = on_trouble
        self._commits_send, self._commits = trio.open_memory_channel[Apply](4)
        self._ranges = ranges_of_stages(plan.body)
        self._feeder = self._make_feeder(me, source)
        self._replica = self._make_replica(self.role) if self.role is not None else None

    @property
    def loss(self) -> float | None:
        """Return the mean loss of the last committed step that had one."""
        return self.losses[-1][1] if self.losses else None

    @property
    def state(self) -> str:
        """Return where this peer is: a replica's state, "feeding" or "standby"."""
        if self._replica is not None:
            return self._replica.step.state.value
        return "feeding" if self._feeder is not None else "standby"

    @property
    def version(self) -> int:
        """Return the version of this peer's stage; 0 without one."""
        return self._replica.step.version if self._replica is not None else 0

    @property
    def queue_length(self) -> int:
        """Return how many tasks wait to be computed."""
        return self._replica.pipeline.queue_length if self._replica is not None else 0

    @property
    def samples(self) -> int:
        """Return how many samples this peer's stage has computed in this epoch."""
        return self._replica.pipeline.samples if self._replica is not None else 0

    @property
    def largest_payload_bytes(self) -> int:
        """Return how many bytes of tensors one message of this plan can carry."""
        tensors = [self._shape.input.nbytes, *(s.output.nbytes for s in self.plan.body.stages)]
        gradients = [8 * bucket.elements for bucket in buckets(self._shape, self._ranges)]
        return max(max(tensors) + self._shape.target.nbytes, *gradients)

    def works_by(self, fence: Fence) -> bool:
        """Return whether a message with this fence was said under this plan."""
        return (fence.generation, fence.epoch) == (self.fence.generation, self.fence.epoch)

    # --- what arrives ------------------------------------------------------------------------

    def check_payload(self, message: Message) -> None:
        """Raise RemoteProtocolError if the message may not carry its tensors to this peer."""
        match message:
            case Backward(path=()):
                raise RemoteProtocolError("a gradient for a feeder carries tensors")
            case Forward() | Backward():
                self._member(message).pipeline.check_payload(message)
            case ReduceShard() | GatherShard():
                self._member(message).reducer.check_payload(message)

    def handle(self, sender: PeerId, message: TrainingMessage, payload: Buffer) -> None:
        """Take in a message of this epoch. Raises RemoteProtocolError if it may not be said."""
        match message:
            case Forward():
                self._member(message).pipeline.forward(sender, message, payload)
            case Backward(path=()) if self._feeder is not None:
                self._feeder.backward(sender, message)
            case Backward():
                self._member(message).pipeline.backward(sender, message, payload)
            case ReduceShard():
                self._member(message).reducer.reduce_shard(sender, message, payload)
            case GatherShard():
                self._member(message).reducer.gather_shard(sender, message, payload)
            case _:
                self._handle_control(sender, message)

    def _handle_control(self, sender: PeerId, message: TrainingMessage) -> None:
        coordinator = step_coordinator_of(self.plan.body)
        match message:
            case LedgerReport():
                self._perform(self._member(message).ledger(sender, message))
            case StartReduction():
                replica = self._member(message)
                self._only(sender, replica.role.group[0], message)
                self._perform(replica.step.start_reduction(message))
            case Report():
                self._perform(self._step_coordinator(message).report(sender, message))
            case Prepared():
                self._perform(self._step_coordinator(message).prepared(sender, message))
            case Resume():
                self._only(sender, coordinator, message)
                self._resume(message)
            case Commit():
                self._only(sender, coordinator, message)
                self._commit(message)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for this peer")

    def _resume(self, message: Resume) -> None:
        if self._feeder is not None:
            self._feeder.resume(message)
        if self._replica is not None:
            self._perform(self._replica.step.resume(message))
            self._replica.pipeline.wake()

    def _commit(self, message: Commit) -> None:
        if self._feeder is not None:
            self._feeder.commit(message)
        if self._replica is not None:
            self._perform(self._replica.step.commit(message))

    def _member(self, message: Message) -> "_Parts":
        if self._replica is None:
            raise RemoteProtocolError(f"{type(message).__name__} for a peer without a stage")
        return self._replica

    def _step_coordinator(self, message: Message) -> StepCoordinator:
        coordinator = self._member(message).step_coordinator
        if coordinator is None:
            raise RemoteProtocolError(f"{type(message).__name__} is for the step coordinator")
        return coordinator

    def _only(self, sender: PeerId, allowed: PeerId, message: Message) -> None:
        if sender != allowed:
            raise RemoteProtocolError(f"{type(message).__name__} from {sender}, not {allowed}")

    # --- what is done ------------------------------------------------------------------------

    async def run(self) -> None:
        """Work by this plan until cancelled."""
        self._links.allow_payloads(self.largest_payload_bytes)
        async with trio.open_nursery() as nursery:
            if self._feeder is not None:
                nursery.start_soon(self._feeder.run)
            if self._replica is not None:
                nursery.start_soon(self._run_replica, self._replica)

    async def _run_replica(self, replica: "_Parts") -> None:
        role = replica.role
        log.info("activate epoch=%d stage=%d", self.plan.header.epoch, role.stage)
        root_hash = await self._executor.build(self._ranges, role.stage)
        first, last = self._ranges[role.stage]
        held = Held(self.plan.header.lineage, first, last, replica.step.version, root_hash)
        report = Report(fence=self.fence, held=(held,))
        self._links.post(step_coordinator_of(self.plan.body), report)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replica.pipeline.run)
            nursery.start_soon(replica.reducer.run)
            await self._run_commits(replica)

    async def _run_commits(self, replica: "_Parts") -> None:
        async for apply in self._commits:
            await self._executor.commit(apply.step, apply.totals)
            totals = apply.totals
            if totals.loss is not None:
                self.losses.append((apply.step, totals.loss))
            log.info(
                "committed step=%d verdict=%s loss=%s", apply.step, totals.verdict, totals.loss
            )
            self._perform(replica.step.applied(totals))
            if replica.step.state is ReplicaState.FINISHED:
                await self._make_durable(replica)
            elif replica.step.state is ReplicaState.HALTED:
                self._on_trouble(_halt_reason(apply))
            replica.pipeline.wake()

    async def _make_durable(self, replica: "_Parts") -> None:
        first, last = self._ranges[replica.role.stage]
        version = replica.step.version
        layers = {layer: await self._executor.layer_state(layer) for layer in range(first, last)}
        hashes = await trio.to_thread.run_sync(self._checkpoints.write, version, layers)
        log.info("durable version=%d layers=%d-%d", version, first, last - 1)
        durable = Durable(
            fence=self.fence, stage=replica.role.stage, version=version, layer_hashes=hashes
        )
        # The council of the active plan decides that a version is complete.
        for voter in self.plan.header.council:
            self._links.post(voter, durable)

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._links.post(peer, message)
                case Reduce() if self._replica is not None:
                    self._replica.reducer.begin()
                case Apply():
                    self._commits_send.send_nowait(effect)
                case Trouble(reason):
                    log.error("trouble epoch=%d reason=%r", self.plan.header.epoch, reason)
                    self._on_trouble(reason)

    def _make_replica(self, role: Role) -> "_Parts":
        return _Parts(
            Replica(
                role=role,
                training=self._training,
                shape=self._shape,
                executor=self._executor,
                links=self._links,
                step=ReplicaStep(role, self._training),
                perform=self._perform,
            )
        )

    def _make_feeder(self, me: Member, source: DataSource | None) -> Feeder | None:
        if source is None or all(each.member != me for each in self.plan.body.feeders):
            return None
        return Feeder(
            body=self.plan.body,
            me=me,
            fence=self.fence,
            training=self._training,
            shape=self._shape,
            source=source,
            links=self._links,
            on_trouble=self._on_trouble,
        )


class _Parts:
    """The parts that a replica of a stage is made of."""

    def __init__(self, replica: Replica) -> None:
        role, training = replica.role, replica.training
        self.role = role
        self.step = replica.step
        self.pipeline = Pipeline(replica)
        self.reducer = Reducer(replica)
        self._group: GroupCoordinator | None = None
        if role.me.peer == role.group[0]:
            self._group = GroupCoordinator(role, training, replica.step.version)
        self.step_coordinator: StepCoordinator | None = None
        if role.me.peer == step_coordinator_of(role.body):
            counted = counted_tensors(replica.shape, ranges_of_stages(role.body))
            self.step_coordinator = StepCoordinator(role, training, counted)

    def ledger(self, sender: PeerId, message: LedgerReport) -> list[Effect]:
        """Take in a ledger as the stage's coordinator."""
        if self._group is None:
            raise RemoteProtocolError("LedgerReport is for the stage's coordinator")
        return self._group.ledger(sender, message)


def counted_tensors(shape: ModelShape, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return how many tensors each stage counts in the norm: those of the buckets it owns."""
    counts = [0] * len(ranges)
    for bucket in buckets(shape, ranges):
        counts[bucket.stages[0]] += len(bucket.slots)
    return tuple(counts)


def _halt_reason(apply: Apply) -> str:
    totals: Totals = apply.totals
    flags = ", ".join(f"microbatch {flag.index} in layer {flag.layer}" for flag in totals.flags)
    text = f"step {apply.step}: non-finite numbers: {flags or 'in the sum of the gradients'}"
    return clip(text)
