"""Errors that end training and explain themselves: the command line prints their message without a traceback."""


class TrainingError(Exception):
    """Training cannot continue. The message says why and what to do."""


class FolderInUse(TrainingError):
    """Another live process is training in this run folder."""


class NothingToResume(TrainingError):
    """The folder holds an earlier training that cannot be resumed. Only the user may decide to begin anew."""


class Diverged(TrainingError):
    """The loss or a score is no longer finite."""


class MasksDiffer(TrainingError):
    """Processes that train together have different masks."""


class DamagedFile(ValueError):
    """A file is not what was written: its checksum or its format is wrong, or it is missing."""
