"""All messages of each socket, by direction. `cluster.wire` turns them into bytes."""

from typing import TypeAlias

from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.messages.changes import (
    ClusterUpgraded,
    DrainNode,
    ModelReloaded,
    NodeDrained,
    ReloadModel,
    Scaled,
    ScaleGroups,
    UpgradeCluster,
)
from cluster.messages.clients import (
    AskTurn,
    CancelByLabel,
    Cancelled,
    ClientHello,
    EngineStarting,
    EngineStopping,
    Refusal,
    ServerInfo,
    TokenizerRequest,
    YourTurn,
)
from cluster.messages.faults import Fault, FaultInjected, InjectFault
from cluster.messages.reports import (
    EngineMetrics,
    MetricsRequest,
    Status,
    StatusRequest,
    StepNews,
    WatchSteps,
)
from cluster.messages.supervisor import (
    AvoidNodes,
    BeginUpgrade,
    GroupLost,
    GroupReady,
    GroupsRenewed,
    GroupStopped,
    HandOver,
    Ping,
    Pong,
    RenewGroups,
    RetireGroup,
    Shutdown,
    StartGroup,
    StartPhases,
    SupervisorHello,
    UpgradeNews,
    UseModel,
)
from cluster.messages.workers import (
    MayLoad,
    PoolSize,
    RankPhase,
    Stop,
    WorkerFailed,
    WorkerGreeting,
    WorkerHello,
    WorkerLease,
    WorkerReady,
)
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Abort, Rejection, Request, TokenBatch

FromClient: TypeAlias = (
    ClientHello
    | TokenizerRequest
    | Request
    | Abort
    | AskTurn
    | StatusRequest
    | CancelByLabel
    | ScaleGroups
    | DrainNode
    | ReloadModel
    | UpgradeCluster
    | MetricsRequest
    | WatchSteps
    | InjectFault
)


ToClient: TypeAlias = (
    ServerInfo
    | EngineStarting
    | EngineStopping
    | Refusal
    | TokenizerFiles
    | TokenBatch
    | Rejection
    | YourTurn
    | Status
    | Cancelled
    | Scaled
    | NodeDrained
    | ModelReloaded
    | ClusterUpgraded
    | EngineMetrics
    | StepNews
    | FaultInjected
)


ToEngine: TypeAlias = (
    WorkerGreeting
    | RankPhase
    | WorkerHello
    | WorkerReady
    | WorkerLease
    | WorkerFailed
    | StepResult
    | SupervisorHello
    | GroupStopped
    | StartPhases
    | UpgradeNews
    | HandOver
    | RenewGroups
    | Ping
    | Shutdown
)


FromEngine: TypeAlias = (
    MayLoad
    | PoolSize
    | StepPlan
    | Fault
    | Stop
    | Refusal
    | BeginUpgrade
    | GroupsRenewed
    | AvoidNodes
    | UseModel
    | StartGroup
    | RankPhase
    | GroupReady
    | GroupLost
    | RetireGroup
    | Pong
)
