"""The one error of this folder: a checkpoint that cannot be used as it is."""


class CheckpointError(ValueError):
    """A checkpoint is absent, damaged, contradicts itself, or asks for what is not supported.

    Its message is one line that names the file and the tensor or field.
    """
