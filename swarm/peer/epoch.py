"""One active plan at work on this peer: activate, report, resume, then step after step.

It wires the parts that this peer's roles ask for (pipeline, reducer, feeder, coordinators) and
performs their effects. The rule: everything here carries the plan's fence and dies with it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from protocol.errors import RemoteProtocolError
from protocol.messages import (
    Backward,
    Commit,
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
)
from protocol.messages import (
    Training as TrainingMessage,
)
from protocol.records import Member, Training
from protocol.signing import PeerId
from swarm.core.chain import Plan
from swarm.core.coordinators import StepCoordinator
from swarm.core.effects import Send
from swarm.core.holding import Holding
from swarm.core.model import ModelShape
from swarm.core.reduction import buckets
from swarm.core.scheduling.planning import version_before
from swarm.core.settlement import NoHolder, replayed_indices
from swarm.core.step import (
    Apply,
    Effect,
    Mishap,
    Recover,
    Reduce,
    ReplicaStep,
    Role,
    Trouble,
    audience_of,
    ranges_of_stages,
    role_of,
    step_coordinator_of,
    workers_of,
)
from swarm.peer.feeder import Feeder
from swarm.peer.follower import Follower
from swarm.peer.hosting import Hosting, Watcher
from swarm.peer.links import Links
from swarm.peer.replica import Replica
from swarm.peer.versions import held_on_disk
from swarm.peer.writer import Writer
from swarm.ports import Buffer, Checkpoints, DataSource, StageExecutor

log = logging.getLogger(__name__)

MAX_WAITING_MESSAGES = 256
"""Of one kind, from one peer, that wait for Resume."""


@dataclass
class Course:
    """How a plan came to work on this peer, in seconds; None where that has not happened."""

    epoch: int
    kind: str
    reason: str
    agree_seconds: float | None = None
    """From the first sign that a plan is needed to its adoption, as far as this peer saw one."""
    report_seconds: float | None = None
    """From activation to Resume."""
    replay_seconds: float | None = None
    """From Resume to the next committed step."""
    step: int | None = None
    """The step in hand."""
    replayed: int = 0
    """Microbatches that were computed again."""


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
        writer: Writer,
        holding: Holding | None,
        on_trouble: Callable[[str], None],
        on_step: Callable[[], None],
        on_loss: Callable[[int, float], None],
    ) -> None:
        """`holding` is what the executor holds; `on_step` is called when the step in hand, or a
        standby's version, has moved on."""
        self.plan = plan
        self.fence = Fence(plan.header.generation, plan.header.epoch, me.boot)
        self.role = role_of(plan.body, me, self.fence, plan.header.lineage)
        header = plan.header
        self.course = Course(header.epoch, header.kind, plan.body.reason)
        self.lost_version: int | None = None
        """As the step coordinator: the version that nobody holds any more of some stage."""
        self._me = me
        self._training = training
        self._shape = shape
        self._executor = executor
        self._links = links
        self._checkpoints = checkpoints
        self._writer = writer
        self._on_trouble = on_trouble
        self._on_step = on_step
        self._on_loss = on_loss
        self._holding = holding
        self._began = trio.current_time()
        self._resumed_at: float | None = None
        self._resume_message: Resume | None = None
        self._waiting: list[tuple[PeerId, TrainingMessage, Buffer]] = []
        self._feeder = self._make_feeder(me, source)
        self._hosting = self._make_hosting(self.role) if self.role is not None else None
        self._follower = self._make_follower()

    @property
    def holding(self) -> Holding | None:
        """Return what the executor holds now."""
        if self._hosting is not None:
            return self._hosting.step.holding
        return self._follower.holding if self._follower is not None else self._holding

    @property
    def state(self) -> str:
        """Return where this peer is: a replica's state, "feeding", "joining", "ready", "standby"
        or "leaving"."""
        if self._hosting is not None:
            return self._hosting.state
        if self._feeder is not None:
            return "feeding"
        if self._follower is not None:
            return "ready" if self._follower.is_ready else "joining"
        return "leaving" if self._me in self.plan.body.leavers else "standby"

    @property
    def stage(self) -> int:
        """Return the stage that this peer hosts or follows; -1 without one."""
        if self.role is not None:
            return self.role.stage
        return self._follower.stage if self._follower is not None else -1

    @property
    def version(self) -> int:
        """Return the version of this peer's stage; 0 without one."""
        if self._hosting is not None:
            return self._hosting.step.version
        return self._follower.version if self._follower is not None else 0

    @property
    def is_replica(self) -> bool:
        """Return whether this peer hosts a stage by this plan."""
        return self._hosting is not None

    @property
    def has_resumed(self) -> bool:
        """Return whether Resume has come."""
        return self._resumed_at is not None

    @property
    def is_step_coordinator(self) -> bool:
        """Return whether this peer merges the Reports."""
        return self._hosting is not None and self._hosting.step_coordinator is not None

    @property
    def replayed(self) -> int:
        """Return how many microbatches are computed again because of this plan."""
        return self.course.replayed

    @property
    def awaits(self) -> tuple[PeerId, ...]:
        """Return who owes this peer a Report or the Resume."""
        if self._hosting is None or self.has_resumed:
            return ()
        coordinator = self._hosting.step_coordinator
        if coordinator is not None:
            return coordinator.awaited
        return (step_coordinator_of(self.plan.body),)

    @property
    def awaits_seconds(self) -> float:
        """Return for how long this peer has waited for Reports or Resume."""
        return trio.current_time() - self._began if self.awaits else 0.0

    @property
    def awaits_in_step(self) -> tuple[PeerId, ...]:
        """Return for whom the step in hand waits here, within a reduction or to commit."""
        return self._hosting.awaits if self._hosting is not None else ()

    @property
    def transfer_seconds(self) -> float:
        """Return how long that may be on its way on links that are just good enough."""
        return self._hosting.reducer.transfer_seconds if self._hosting is not None else 0.0

    @property
    def queue_length(self) -> int:
        """Return how many tasks wait to be computed."""
        return self._hosting.pipeline.queue_length if self._hosting is not None else 0

    @property
    def samples(self) -> int:
        """Return how many samples this peer's stage has computed in this epoch."""
        return self._hosting.pipeline.samples if self._hosting is not None else 0

    @property
    def computed(self) -> int:
        """Return how many microbatches went forward and backward here in this epoch."""
        return self._hosting.pipeline.computed if self._hosting is not None else 0

    @property
    def compute_seconds(self) -> float:
        """Return how long forward and backward of those took."""
        return self._hosting.pipeline.compute_seconds if self._hosting is not None else 0.0

    @property
    def is_training(self) -> bool:
        """Return whether this peer computes, feeds, or fetches a state by this plan."""
        return self.is_replica or self.state in ("feeding", "joining")

    @property
    def largest_payload_bytes(self) -> int:
        """Return how many bytes of tensors one message of this plan can carry."""
        tensors = [self._shape.input.nbytes, *(s.output.nbytes for s in self.plan.body.stages)]
        gradients = [
            8 * bucket.elements for bucket in buckets(self._shape, ranges_of_stages(self.plan.body))
        ]
        return max(max(tensors) + self._shape.target.nbytes, *gradients)

    def opened(self, peer: PeerId) -> None:
        """A link to a peer can be used: a Resume may have been lost with the one before.

        It is said again to who has no work. Where a worker lacks it, a repair follows."""
        if self._hosting is not None:
            self._hosting.opened(peer)
        if self.is_step_coordinator and self._resume_message is not None:
            body = self.plan.body
            if peer in audience_of(body) and peer not in workers_of(body):
                self._links.post(peer, self._resume_message)

    def tell_durable(self) -> None:
        """There is more on this peer's disk: tell the council."""
        if self._hosting is not None:
            self._hosting.tell_durable(self.plan.header.council)

    def end_before(self, step: int) -> None:
        """A planned change begins with `step`: this plan feeds no more from there on."""
        if self._feeder is not None:
            self._feeder.end_before(step)

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
        """Take in a message of this epoch. Raises RemoteProtocolError if it may not be said.

        What the others say after their Resume waits for this peer's own."""
        if self._resumed_at is None and not isinstance(message, Report | Resume):
            self._keep(sender, message, payload)
        else:
            self._take(sender, message, payload)

    def _keep(self, sender: PeerId, message: TrainingMessage, payload: Buffer) -> None:
        if isinstance(message, LedgerReport):  # the newest says all that the others said
            self._waiting = [
                each
                for each in self._waiting
                if each[0] != sender or not isinstance(each[1], LedgerReport)
            ]
        same = sum(each[0] == sender and type(each[1]) is type(message) for each in self._waiting)
        if same >= MAX_WAITING_MESSAGES:
            raise RemoteProtocolError(
                f"{same} messages {type(message).__name__} of {sender} wait for Resume"
            )
        self._waiting.append((sender, message, payload))

    def _take(self, sender: PeerId, message: TrainingMessage, payload: Buffer) -> None:
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
                self._take_control(sender, message)

    def _take_control(self, sender: PeerId, message: TrainingMessage) -> None:
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
        if self.has_resumed:
            return
        if len(message.stages) != len(self.plan.body.stages):
            raise RemoteProtocolError(
                f"Resume settles {len(message.stages)} stages of {len(self.plan.body.stages)}"
            )
        if self._feeder is not None:
            self._feeder.resume(message)
        self._resumed_at = trio.current_time()
        course = self.course
        course.report_seconds, course.step = self._resumed_at - self._began, message.step
        course.replayed = replayed_indices(message.stages, self._training.microbatches_per_step)
        log.info(
            "resume epoch=%d step=%d replayed=%d",
            self.plan.header.epoch,
            message.step,
            course.replayed,
        )
        if self._hosting is not None:
            self._hosting.resume(message)
        if self._follower is not None:
            self._follower.resume(message)
        self._resume_message = message
        waiting, self._waiting = self._waiting, []
        for sender, early, payload in waiting:
            try:
                self._take(sender, early, payload)
            except RemoteProtocolError as fault:
                log.warning("waiting message dropped peer=%s fault=%r", sender, str(fault))
        self._on_step()

    def _commit(self, message: Commit) -> None:
        if self.course.replay_seconds is None and self._resumed_at is not None:
            self.course.replay_seconds = trio.current_time() - self._resumed_at
        if self._feeder is not None:
            self._feeder.commit(message)
        if self._hosting is not None:
            self._perform(self._hosting.step.commit(message))
        if self._follower is not None:
            self._follower.commit(message)

    def _member(self, message: Message) -> Hosting:
        if self._hosting is None:
            raise RemoteProtocolError(f"{type(message).__name__} for a peer without a stage")
        return self._hosting

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
            if self._hosting is not None:
                nursery.start_soon(self._hosting.run)
            else:
                nursery.start_soon(self._stand_down)
            if self._follower is not None:
                nursery.start_soon(self._follower.run)

    async def _stand_down(self) -> None:
        """Without a role an accumulator does not count; a leaver's state and gradient are still
        others' to fetch, and the step coordinator is told of them."""
        held: tuple[Held, ...] = ()
        if self._holding is not None:
            prepared = await self._executor.settle()
            await self._executor.discard()
            held = (self._holding.reported(self._executor.ledger.bitmap, prepared=prepared),)
        if self._me in self.plan.body.leavers:
            header, body = self.plan.header, self.plan.body
            size = len(self._executor.ledger.bitmap)
            ranges = ranges_of_stages(body)
            held += await held_on_disk(self._checkpoints, header, body, ranges, size)
            report = Report(fence=self.fence, held=held)
            self._links.post(step_coordinator_of(self.plan.body), report)

    def _perform(self, effects: Sequence[Effect | NoHolder]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._links.post(peer, message)
                case Reduce() if self._hosting is not None:
                    self._hosting.reducer.begin()
                case Apply() if self._hosting is not None:
                    self._hosting.apply(effect)
                case Recover() if self._hosting is not None:
                    self._hosting.recover(effect)
                case Mishap(reason):
                    log.error("mishap epoch=%d reason=%r", self.plan.header.epoch, reason)
                case NoHolder(stage, version):
                    log.error("nobody holds stage=%d version=%d", stage, version)
                    self.lost_version = version
                case Trouble(reason):
                    log.error("trouble epoch=%d reason=%r", self.plan.header.epoch, reason)
                    self._on_trouble(reason)

    def _make_hosting(self, role: Role) -> Hosting:
        replica = Replica(
            role=role,
            training=self._training,
            shape=self._shape,
            executor=self._executor,
            links=self._links,
            step=ReplicaStep(role, self._training, self._holding),
            perform=self._perform,
        )
        watcher = Watcher(
            on_step=self._on_step,
            on_loss=self._on_loss,
            on_trouble=self._on_trouble,
        )
        return Hosting(
            replica,
            self.plan.header,
            self._checkpoints,
            self._writer,
            self._perform,
            watcher,
        )

    def _make_follower(self) -> Follower | None:
        for standby in self.plan.body.standby:
            if standby.member == self._me:
                return Follower(
                    stage=standby.stage,
                    body=self.plan.body,
                    shape=self._shape,
                    lineage=self.plan.header.lineage,
                    holding=self._holding,
                    executor=self._executor,
                    links=self._links,
                    is_leaver=self._me in self.plan.body.leavers,
                    on_step=self._on_step,
                    begins_at=self._begins_at,
                )
        return None

    @property
    def _begins_at(self) -> int:
        """Return the version of the groups while a planned change waits for the end of a step; who
        is new works by no other plan meanwhile, and can fetch that. -1 if it is not known."""
        header = self.plan.header
        is_waiting = header.kind == "planned" and header.from_step > 0
        return version_before(header) if is_waiting and self._holding is None else -1

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
