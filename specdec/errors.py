"""The exceptions that specdec raises for its users' mistakes. Layer 0: knows nothing else.

Every message names the offending value and what to do about it. `SpecdecError` catches them all::

    SpecdecError
    ├── InvalidRequest        (also ValueError)  a prompt or a parameter is out of bounds
    │   └── ContextLengthExceeded                the prompt is too long for the model or the engine
    ├── ConfigError           (also ValueError)  an engine option is out of bounds or unknown
    ├── ModelNotFound                            the model is neither a path, a known name nor on the hub
    ├── UnsupportedModel                         the architecture can't be run, and why
    ├── CheckpointError                          a weights file is missing, broken, or for another model
    ├── DataError             (also ValueError)  training data can't be read, used or stored
    ├── DownloadError                            fetching a model failed; nothing was kept
    ├── TrainingError                            training can't go on, or its results can't be written
    ├── OutOfBlocks                              the KV cache is too small for this request
    ├── QueueFull                                too many requests are waiting; come again later
    ├── ShuttingDown                             the engine takes no new requests any more
    └── EngineDead                               a step failed; every request of the engine fails with it
"""


class SpecdecError(Exception):
    """Base of every error that specdec raises on purpose."""


class InvalidRequest(SpecdecError, ValueError):  # noqa: N818 - the field's name for it
    """A prompt or a sampling parameter is out of bounds."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt is longer than the context limit allows."""


class ConfigError(SpecdecError, ValueError):
    """An engine or drafter option is unknown or out of bounds."""


class ModelNotFound(SpecdecError):  # noqa: N818
    """The model is neither a local folder, nor a name that `specdec pull` knows, nor on the hub."""


class UnsupportedModel(SpecdecError):  # noqa: N818
    """The model's architecture can't be run; the message says which part and why."""


class CheckpointError(SpecdecError):
    """A weights or config file is missing, broken, or belongs to another model."""


class DataError(SpecdecError, ValueError):
    """Training data can't be read, used or stored; the message names the file and the line."""


class DownloadError(SpecdecError):
    """Fetching or converting a model failed; nothing half-written was kept."""


class TrainingError(SpecdecError):
    """Training can't go on, or its results can't be written; the last checkpoint is whole."""


class OutOfBlocks(SpecdecError):  # noqa: N818
    """The KV cache has too few blocks for one request."""


class QueueFull(SpecdecError):  # noqa: N818
    """Too many requests are running and waiting; this one was not taken."""


class ShuttingDown(SpecdecError):  # noqa: N818
    """The engine finishes what it has and takes nothing new."""


class EngineDead(SpecdecError):  # noqa: N818
    """A step of the engine failed, so that nothing it holds can be trusted; its cause is chained."""
