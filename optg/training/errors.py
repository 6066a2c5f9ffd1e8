"""Errors that end training and explain themselves: the command line prints their message without a traceback."""


class TrainingError(Exception):
    """Training cannot continue. The message says why and what to do."""


class FolderInUse(TrainingError):
    """Another live process is training in this run folder."""


class Diverged(TrainingError):
    """The loss or a score is no longer finite."""


class MasksDiffer(TrainingError):
    """Processes that train together have different masks."""
