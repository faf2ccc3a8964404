"""What a leader wants next: it gathers what the policy of core/drafting.py decides by.

Voters gather it, too: whoever leads next has heard the same. The rule: a draft waits 200 ms from
the first change, so that changes that belong together make one plan.
"""

import logging
import math
from collections.abc import Mapping

from protocol.errors import RemoteProtocolError
from protocol.messages import Durable, Heartbeat, LostWork
from protocol.records import (
    Completed,
    Estimates,
    Manifest,
    Member,
    PlanBody,
    Signed,
    decode_record,
)
from protocol.signing import PeerId
from swarm.core.agreement import Agreement
from swarm.core.ballots import Draft
from swarm.core.chain import Plan
from swarm.core.completion import Completion, Layers
from swarm.core.council import next_council
from swarm.core.debounce import Debounce
from swarm.core.drafting import NoHolder, is_needed, next_draft, same_roles
from swarm.core.losses import Losses
from swarm.core.measuring.gathering import Gathering
from swarm.core.membership import Membership
from swarm.core.memo import by_pair
from swarm.core.pace import CONSENTS
from swarm.core.roles import Placing, Situation
from swarm.core.roll import records_of
from swarm.core.scheduling.aims import aims_of
from swarm.core.scheduling.calm import Calm
from swarm.core.scheduling.horizon import Horizon
from swarm.core.scheduling.planning import (
    Candidate,
    candidates_of,
    completing_plan,
    evicted,
    first_plan,
    halting_plan,
    is_ready,
    members_of,
    plan_by,
    problem_for,
    solved_plan,
    version_before,
)
from swarm.core.scheduling.problem import Assignment, Problem
from swarm.core.scheduling.rebalance import HYSTERESIS
from swarm.core.step import ReplicaState, replicas_of
from swarm.core.verification import JOIN_REQUEST_EPOCHS, check_plan
from swarm.errors import NoFeasiblePlan
from swarm.peer.roster import Roster
from swarm.peer.solving import Question, Solving, seconds_by

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often a leader thinks again although nothing has changed: evidence gets old."""
MEASURED_PAUSES = 3
"""So many times as long a leader of a large swarm waits where there are other measurements only."""
UNCHANGED_SECONDS = 30.0
"""How often it thinks again of plans that lose nothing although nothing has changed."""
NOT_SETTLED = frozenset(
    {ReplicaState.WAITING.value, ReplicaState.RECOVERING.value, "measuring", "starting"}
)


class Leading:
    """What this peer would propose if it led."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        me: Member,
        agreement: Agreement,
        members: Membership,
        roster: Roster,
        wait_for_peers: int,
        stages: int,
        solves: bool,
        place: Placing | None,
    ) -> None:
        """`wait_for_peers` and `stages` are for the first plan: how many peers it waits for, and
        its number of stages. `solves`: whether there is a solver to ask (`question`).
        `place`: the rule by which everybody gets a stage, if it is not our own."""
        self._manifest = manifest
        self._me = me
        self._agreement = agreement
        self._members = members
        self._roster = roster
        self._wait_for_peers = wait_for_peers
        self._stages = stages
        self._solves = solves
        self.place = place
        self._candidates: dict[PeerId, Candidate] = {}
        self._consents: dict[PeerId, Signed] = {}
        self._completion = Completion()
        self._losses = Losses()
        self._halt = ""
        self._no_holder_since: float | None = None
        self._changes = Debounce()
        self._solving = Solving()
        self._gathering = Gathering()
        self._calm = Calm()
        self._horizon = Horizon()
        self._step_began = -1, 0.0
        """The step in hand, and when it began."""
        self._step_seconds = 0.0
        """What the one before took; 0 if that is not known."""
        self._news = 0
        """Grows with whatever this peer is told that a draft depends on."""
        self._looked: tuple[object, ...] | None = None
        self._looked_at = self._look_at = -math.inf
        self._estimates: Mapping[PeerId, Signed] = {}
        self._estimates_until = -math.inf
        """What peers have measured, and until when that is new enough."""
        self._weighed: tuple[object, ...] | None = None
        """Who was ready, and when, when it was last thought of giving them work."""
        self._improved: tuple[object, ...] | None = None
        self._improved_by = 0
        self._improved_at = -math.inf
        """By what, and when, it was thought of plans that lose nothing."""
        self.trouble = ""
        """Why no plan is possible; "" while one is, or none is needed."""

    @property
    def plan(self) -> Plan:
        """Return the newest certified plan."""
        return self._agreement.newest

    @property
    def candidates(self) -> frozenset[PeerId]:
        """Return the peers that ask to join."""
        return frozenset(self._candidates)

    @property
    def references(self) -> list[Candidate]:
        """Return whom newcomers have to agree with: the members, or whoever asked before, of whom
        the founder is the first; nobody while that has not asked."""
        members = list(candidates_of(self.plan.body).values())
        founder = self._candidates.get(self._manifest.founder)
        if members or founder is None:
            return members
        return [founder, *self._candidates.values()]

    @property
    def waiting_for(self) -> int:
        """Return how many more peers must join before the first plan."""
        if self.plan.body.stages:
            return 0
        return max(0, self._wait_for_peers - len(self._candidates))

    # --- what is told ---------------------------------------------------------------------

    def take_in(self, candidate: Candidate) -> None:
        """A peer asks to join."""
        if candidate.member not in members_of(self.plan.body):
            self._candidates[candidate.member.peer] = candidate
            self._estimates_until = -math.inf
            self._news += 1

    def drop_candidate(self, peer: PeerId) -> None:
        """Who asked to join has gone."""
        self._candidates.pop(peer, None)
        self._news += 1

    def forget_candidates(self) -> None:
        """Let all who would join ask again: a plan with them has been refused."""
        self._candidates.clear()
        self._news += 1

    def refused(self) -> None:
        """A draft was not found good: what it aimed at is given up."""
        self._solving.target = {}

    def consented(self, peer: PeerId, consent: Signed) -> None:
        """A member would vote from the newest epoch on; the signature has been checked."""
        self._consents[peer] = consent

    def lost_work(self, sender: PeerId, message: LostWork, now: float) -> None:
        """Frames between two workers were lost with a link. It may be said again and again."""
        self._losses.lost(sender, message.peer, (message.generation, message.epoch), now)
        self._news += 1

    def heard(self, peer: PeerId, at: float) -> None:
        """A peer is alive: what was lost with its link is work, not the peer."""
        if self._losses.heard(peer, at):
            self._news += 1

    def halt(self, reason: str) -> None:
        """Training cannot go on: the next plan says so."""
        body = self.plan.body
        if body.stages and not body.halted and not body.ended:
            self._halt = self._halt or reason
            self._news += 1

    def durable(self, sender: PeerId, message: Durable) -> None:
        """A replica has written its layers, by the active plan. Raises RemoteProtocolError if it
        does not host that stage, or the version is not one that is written."""
        header, body = self._agreement.active.header, self._agreement.active.body
        if message.stage >= len(body.stages) or sender not in replicas_of(body, message.stage):
            raise RemoteProtocolError(f"{sender} does not host stage {message.stage}")
        training = self._manifest.training
        every = training.checkpoints.every_steps
        due = message.version == training.steps or (every and message.version % every == 0)
        if not due or message.version > training.steps:
            raise RemoteProtocolError(f"{sender} wrote version {message.version}, which is not due")
        stage = body.stages[message.stage]
        if len(message.layer_hashes) != stage.last - stage.first:
            raise RemoteProtocolError(
                f"{sender} wrote {len(message.layer_hashes)} layers of stage {message.stage}, "
                f"which has {stage.last - stage.first}"
            )
        layers = Layers(header.lineage, message.version, stage.first, stage.last)
        self._completion.written(sender, layers, message.layer_hashes)
        self._news += 1

    def adopted(self, before: Plan, now: float) -> None:
        """There is a newer plan: most of what was asked for is settled."""
        left, joined = _exchanged(self.plan.body, before.body)
        if left:
            self._horizon.left(now, left)
        if left or joined:
            self._estimates_until = -math.inf
        if before.body.stages and (left or joined):
            self._calm.members_changed(now)
        elif not _same_roles(self.plan.body, before.body):
            self._calm.begin(now)
            is_planned = before.body.stages and self.plan.header.kind == "planned"
            if is_planned and not _is_needed(self.plan.body, before.body):
                self._calm.changed(now)
        self._consents.clear()
        at_once = self.plan.header.kind == "repair" or not before.body.stages
        self._losses.adopted(self.plan.key, at_once=at_once)
        self._halt = ""
        self.trouble = ""
        self._solving.adopted(self.plan.body)
        self._candidates = {each.member.peer: each for each in self._joining()}
        self._completion.forget_all_but(set(records_of(self.plan.body)))
        if at_once or self.plan.body.ended:
            self._no_holder_since = None

    # --- what follows ---------------------------------------------------------------------

    def begin(self) -> None:
        """This peer begins to lead: changes that it has seen when it led before have waited for
        nothing since."""
        self._changes.forget()
        self.look_again()

    def look_again(self) -> None:
        """What was drafted last was not found good."""
        self._looked = self._improved = self._weighed = None
        self._estimates_until = -math.inf
        self._improved_at = -math.inf

    @property
    def deadline(self) -> float:
        """Return when a draft that waits for further changes is due."""
        return self._changes.deadline

    @property
    def look_at(self) -> float:
        """Return when to look again whether there is one, though nothing has changed."""
        due = min(self._changes.deadline, self._look_at)
        if self._looked == self._all_changes:
            return due
        return min(due, self._looked_at + self._roster.pace.draft_pause_seconds)

    def is_due(self, now: float) -> bool:
        """Return whether something that a draft depends on may be other than at the last one: it
        has changed, or time has passed. In a large swarm changes gather for a moment."""
        return now >= self.look_at

    @property
    def _all_changes(self) -> tuple[object, ...]:
        heard = self._roster.changes, self._members.changes, len(self._consents)
        return (self.plan.key, self._news, *heard)

    def draft(self, now: float) -> tuple[Draft, tuple[Signed, ...]] | None:
        """Return the plan that this peer would propose now, with its evidence; None if there is
        none, or if further changes may come."""
        pace = self._roster.pace
        self._looked, self._looked_at = self._all_changes, now
        self._look_at = now + max(LOOK_SECONDS, pace.moment_seconds)
        wanted = self._wanted(now)
        if wanted is None:
            self._changes.forget()
            return None
        self._changes.note(now)
        if not self._changes.due(now):
            return None
        return wanted, self._evidence(wanted, now)

    def _wanted(self, now: float) -> Draft | None:
        header, body = self.plan.header, self.plan.body
        if body.ended or body.halted:
            return None
        if not body.stages:
            return self._first(now)
        if self._halt:
            same = halting_plan(body, self._halt)
            return Draft(same, "planned", 0, header.lineage, header.council)
        situation, completed = self._situation(now), self._completed()
        ended = completed is not None and completed.version == self._manifest.training.steps
        # While a plan is not settled some may not even have it: another one would overtake it.
        if completed is not None and (ended or situation.settled):
            same = completing_plan(body, completed, ended=ended)
            # In the middle of a run it waits for the next step boundary, where nothing is lost.
            from_step = completed.version if ended else self.version + 1
            return Draft(same, "planned", from_step, header.lineage, header.council)
        wanted = next_draft(situation)
        self.trouble = wanted.reason if isinstance(wanted, NoHolder) else ""
        if isinstance(wanted, NoHolder):
            self._no_holder_since = self._no_holder_since or now
            return None
        if wanted is None:  # a draft that is wanted since nobody came back stays so until decided
            self._no_holder_since = None
        return wanted

    def _first(self, now: float) -> Draft | None:
        founder = self._candidates.get(self._me.peer)
        if founder is None or self.waiting_for:
            return None
        try:
            body = self._first_body(now)
        except NoFeasiblePlan as error:
            self.trouble = f"{error.what} ({error.hint})"
            return None
        self.trouble = ""
        if body is None:
            return None
        council = next_council(self.plan.header.council, body, frozenset(self._consents))
        return Draft(body, "planned", 0, 0, council)

    def _first_body(self, now: float) -> PlanBody | None:
        """Return the first plan; None while it waits for measurements or for the solver."""
        candidates, estimates = self._all_candidates, self._roster.estimates
        training = self._manifest.training
        if self._stages or training.slicing.cuts:
            return first_plan(training, candidates, self._stages, estimates)
        if self._solves:
            if not self._solving.is_answered([each.request.peer for each in candidates]):
                return None
            if self._solving.answer is not None:
                return solved_plan(training, candidates, estimates, self._solving.answer)
        elif not self._is_measured(now):
            return None
        return first_plan(training, candidates, 0, estimates)

    def _completed(self) -> Completed | None:
        """Return the version that all replicas have written, if it is not named complete yet.

        Replicas that wrote different weights halt the run, or, in standard mode, leave it to the
        first of their stage what the weights are."""
        body, lineage = self.plan.body, self.plan.header.lineage
        completed = self._completion.complete(body, lineage)
        if completed is None:
            return None
        unlike = self._completion.unlike(body, lineage, completed.version)
        exact = self._manifest.training.execution.determinism == "exact"
        if unlike and exact:
            self.halt(f"replicas of stage {unlike[0][0]} ended with different weights")
            return None
        for stage, peer in unlike:
            log.warning("other weights version=%d stage=%d peer=%s", completed.version, stage, peer)
        return completed

    @property
    def _hosting(self) -> list[PeerId]:
        body = self.plan.body
        return [peer for stage in range(len(body.stages)) for peer in replicas_of(body, stage)]

    @property
    def version(self) -> int:
        """Return the newest version that a replica of the newest plan has told of, or from which
        that plan goes on: a replica that does not hold it yet tells of none."""
        heartbeats, header = self.heartbeats(), self.plan.header
        told = [heartbeats[peer] for peer in self._hosting if peer in heartbeats]
        versions = [each.version for each in told if each.lineage == header.lineage]
        return max([version_before(header), *versions])

    def _situation(self, now: float) -> Situation:
        header, body = self.plan.header, self.plan.body
        heartbeats = self.heartbeats()
        since = self._no_holder_since
        settled = all(self._is_settled(peer, heartbeats) for peer in self._hosting)
        least_gain = self._calm.least_gain(now) if self.place is None else HYSTERESIS
        if settled:
            self._losses.settled(self.plan.key)
        version = self.version
        self._note_version(version, now)
        pending = not settled and self._is_pending(version, heartbeats)
        waiting = [peer for peer, each in heartbeats.items() if each.awaits or each.rollback >= 0]
        return Situation(
            manifest=self._manifest,
            header=header,
            body=body,
            heartbeats=heartbeats,
            gone=self._members.gone(members_of(body), now, waiting),
            joining=self._joining(),
            consents=frozenset(self._consents) - frozenset(self._members.suspects),
            lost_work=self._losses.reason,
            apart=self._losses.apart(now),
            settled=settled,
            pending=pending,
            step_left_seconds=self._step_left_seconds(now),
            version=version,
            waited_seconds=now - since if since is not None else 0.0,
            estimates=self._told(now),
            horizon_seconds=self.horizon_seconds,
            promotes=(settled or pending) and self._promotes(heartbeats),
            improves=settled and self._improves(heartbeats, least_gain, now),
            least_gain=least_gain,
            place=self.place,
            target=self._solving.target,
        )

    def _told(self, now: float) -> Mapping[PeerId, Signed]:
        """Return what peers have measured; in a large swarm, where somebody always tells something,
        as it was when the members were others or a while ago: it makes one network for all drafts
        of that time."""
        if now >= self._estimates_until:
            self._estimates = self._roster.estimates
            self._estimates_until = now + self._roster.pace.improvement_pause_seconds
        return self._estimates

    def _promotes(self, heartbeats: Mapping[PeerId, Heartbeat]) -> bool:
        """Return whether it is time to think of those who are ready: when there are others than
        last time, or in another step; what is wanted by then is looked at once more."""
        lineage, version = self.plan.header.lineage, self.version + 1
        ready = tuple(
            each.member
            for each in self.plan.body.standby
            if (heartbeat := heartbeats.get(each.member.peer)) is not None
            and is_ready(heartbeat, each.member, each.stage, lineage, version)
        )
        weighed = (self.plan.key, version, ready)
        if not ready or (weighed == self._weighed and math.isinf(self._changes.deadline)):
            return False
        self._weighed = weighed
        return True

    def _improves(self, heartbeats: dict[PeerId, Heartbeat], least_gain: float, now: float) -> bool:
        """Return whether it is time to think of plans that lose nothing: when something is new,
        which in a large swarm is looked at now and then; or after a while. What is wanted by then
        is looked at once more when changes have gathered."""
        waiting = [heartbeats.get(each.member.peer) for each in self.plan.body.standby]
        known = (
            *(self.plan.key, self._news, self._members.changes, least_gain),
            min(len(self._consents), CONSENTS),
            *((each.state, each.stage, each.version) for each in waiting if each is not None),
        )
        measured = self._roster.measurements
        pause = self._roster.pace.improvement_pause_seconds
        if self._improved == known:
            is_same = self._improved_by == measured
            pause = max(pause, UNCHANGED_SECONDS) if is_same else MEASURED_PAUSES * pause
        if now < self._improved_at + pause and math.isinf(self._changes.deadline):
            return False
        self._improved, self._improved_by, self._improved_at = known, measured, now
        return True

    def _is_pending(self, version: int, heartbeats: dict[PeerId, Heartbeat]) -> bool:
        """Return whether the newest plan waits for the end of the step in hand, which goes on by
        the one before."""
        header = self.plan.header
        if header.kind != "planned" or version >= header.from_step:
            return False
        told = [heartbeats[peer] for peer in self._hosting if peer in heartbeats]
        return len(told) == len(self._hosting) and all(
            each.generation == header.generation
            and each.active_epoch < header.epoch
            and each.state not in NOT_SETTLED
            for each in told
        )

    def _note_version(self, version: int, now: float) -> None:
        """Note when steps begin, as far as this peer hears of it."""
        if version != self._step_began[0]:
            is_next = version == self._step_began[0] + 1
            self._step_seconds = now - self._step_began[1] if is_next else 0.0
            self._step_began = version, now

    def _step_left_seconds(self, now: float) -> float:
        """Return what is left of the step in hand if it takes as long as the one before, or as the
        plan promises."""
        expected = self._step_seconds or self.plan.body.step_seconds
        return max(0.0, expected - (now - self._step_began[1]))

    # --- the full solve -------------------------------------------------------------------

    @property
    def _all_candidates(self) -> list[Candidate]:
        return [self._candidates[peer] for peer in sorted(self._candidates)]

    def question(self, now: float) -> Question | None:
        """Return a problem that the solver should work on now, in the background; None if there is
        none. It is then under way until `answered`."""
        body = self.plan.body
        if not self._solves or body.ended or body.halted:
            return None
        if not body.stages:
            return self._first_question(now)
        roles = (self.plan.key, body.members, body.stages, body.standby)
        if not self._solving.is_due(roles, now) or not self._is_all_settled:
            return None
        council = self.plan.header.council
        seed = council.index(self._me.peer) if self._me.peer in council else len(council)
        problem = self._problem_now()
        return self._solving.question(problem, roles, seed, now, seconds_by(problem, body))

    def _first_question(self, now: float) -> Question | None:
        candidates, estimates = self._all_candidates, self._roster.estimates
        roles = tuple(each.record for each in candidates)
        is_free = not self._stages and not self._manifest.training.slicing.cuts
        if not is_free or self.waiting_for or self._me.peer not in self._candidates:
            return None
        if not self._solving.is_due(roles, now) or not self._is_measured(now):
            return None
        problem = problem_for(self._manifest.training, candidates, estimates)
        return self._solving.question(problem, roles, 0, now)

    def _is_measured(self, now: float) -> bool:
        """Return whether candidates have measured enough for a first plan, or have had the time."""
        estimates = self._roster.estimates
        peers = [each.member.peer for each in self._all_candidates]
        told = {
            peer: decode_record(estimates[peer].payload, Estimates)
            for peer in peers
            if peer in estimates
        }
        return self._gathering.is_enough(peers, told, now)

    def answered(self, problem: Problem, assignment: Assignment | None) -> PlanBody | None:
        """The solver has ended, perhaps without an answer. Return the plan that this leads to, if
        it is better than what the newest plan leads to: it is aimed at from now on."""
        self._news += 1
        self._solving.answered(problem, assignment)
        body, now = self.plan.body, self._problem_now() if self.plan.body.stages else problem
        same = [peer.id for peer in now.peers] == [peer.id for peer in problem.peers]
        if assignment is None or not body.stages or not same:
            return None
        if not self._solving.propose(now, body, assignment):
            return None
        return plan_by(now, list(candidates_of(body).values()), assignment, programs=False)

    def propose(self, body: PlanBody) -> bool:
        """Somebody has made a plan that could follow the newest one: aim at it if it is better.
        Return whether it is. Raises RemoteProtocolError if it is not well-formed."""
        now = self.plan.body
        check_plan(body, self._manifest)
        if not now.stages or members_of(body) != members_of(now):
            return False
        self._news += 1
        problem = self._problem_now()
        index = {member: i for i, member in enumerate(members_of(now))}
        return self._solving.propose(problem, now, aims_of(problem, body, index))

    def _problem_now(self) -> Problem:
        body = self.plan.body
        members = list(candidates_of(body).values())
        return problem_for(
            self._manifest.training,
            members,
            self._roster.estimates,
            before=body,
            horizon_seconds=self.horizon_seconds,
        )

    @property
    def horizon_seconds(self) -> float:
        """Return how long a role is expected to last, by the last losses of members."""
        return self._horizon.seconds(len(self.plan.body.members))

    @property
    def _is_all_settled(self) -> bool:
        heartbeats = self.heartbeats()
        return all(self._is_settled(peer, heartbeats) for peer in self._hosting)

    def _joining(self) -> list[Candidate]:
        """Return who asks to join, in order of peer: requests that are good for the next plan.

        This peer may have taken one in long ago, when it led, or of a start that is over."""
        if not self._candidates:
            return []
        boots = {member.peer: member.boot for member in members_of(self.plan.body)}
        return [
            each
            for peer, each in sorted(self._candidates.items())
            if each.member.boot > boots.get(peer, 0)
            and each.member.boot >= self._members.boot_of(peer)
            and self.plan.header.epoch <= each.request.epoch + JOIN_REQUEST_EPOCHS
        ]

    def heartbeats(self) -> dict[PeerId, Heartbeat]:
        """Return recent heartbeats of the members' starts that the newest plan names."""
        found = {}
        for member in members_of(self.plan.body):
            heartbeat = self._roster.heartbeat(member)
            if heartbeat is not None:
                found[member.peer] = heartbeat
        return found

    def _is_settled(self, peer: PeerId, heartbeats: dict[PeerId, Heartbeat]) -> bool:
        """Return whether a replica of the newest plan is active and has resumed."""
        heartbeat = heartbeats.get(peer)
        return (
            heartbeat is not None
            and (heartbeat.generation, heartbeat.active_epoch) == self.plan.key
            and heartbeat.state not in NOT_SETTLED
        )

    def _evidence(self, draft: Draft, now: float) -> tuple[Signed, ...]:
        found: list[Signed] = []
        for member in evicted(self.plan.body, draft.body):
            found.extend(self._members.evidence(member))
        for peer in draft.council:
            if peer not in self.plan.header.council and peer in self._consents:
                found.append(self._consents[peer])
        estimates = self._told(now)
        found += [estimates[each.signer] for each in draft.body.members if each.signer in estimates]
        return tuple(found)


@by_pair
def _exchanged(body: PlanBody, before: PlanBody) -> tuple[int, int]:
    """Return how many members, or starts of them, a plan has no more, and how many are new."""
    members, former = set(members_of(body)), set(members_of(before))
    return len(former - members), len(members - former)


# Everybody asks this of every plan.
_same_roles, _is_needed = by_pair(same_roles), by_pair(is_needed)
