"""What ends a training run early.

TrainerError
├── JobError        the job can't be trained as it is written
├── ProtocolError   the runtime refused a request, went away, or answered something else than the contract says
└── Stopped         the runtime says that the run was stopped: no failure
"""


class TrainerError(Exception):
    """Ends the run; its message is the last line of the log."""


class JobError(TrainerError):
    pass


class ProtocolError(TrainerError):
    pass


class Stopped(TrainerError):  # noqa: N818 - it is no error
    pass
