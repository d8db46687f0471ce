"""Errors of processes, sockets and start-up."""


class WireError(ValueError):
    """Bytes that are not a message we know; says what is wrong with them."""


class LinkLost(ConnectionError):
    """The other end of a link is gone, or never came."""


class PeerGone(ConnectionError):
    """A message could not be handed to one peer of a socket.

    Attributes:
        has_left: its connection ended, which the socket will also say after its last message;
            otherwise it reads too slowly.
    """

    def __init__(self, *, has_left: bool) -> None:
        super().__init__(
            "it has left" if has_left else "it reads too slowly, so that its queue is full"
        )
        self.has_left = has_left


class AddressError(ValueError):
    """An address that cannot be bound or dialled; says which, why, and what to change."""


class KeyFileError(AddressError):
    """A key file is missing, unreadable, damaged, or something else."""


class BackendError(RuntimeError):
    """Workers could not be placed, started or ended; says what was wanted and what there is."""


class RemoteError(RuntimeError):
    """Another machine cannot be reached, or did not do what it was told; names it."""


class StartFailed(RuntimeError):
    """The cluster did not come up; carries the message of the part that failed."""


class StartInterrupted(RuntimeError):
    """Somebody asked the cluster to stop before it was up."""


class ClusterLost(RuntimeError):
    """A cluster that was up cannot go on; carries the message of the part that failed."""


class ModelError(Exception):
    """A model cannot be used as it was given; the text says why and what would work."""
