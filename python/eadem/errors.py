# SPDX-License-Identifier: Apache-2.0
"""The exceptions that the engine raises.

Every one is an :class:`Error`; most are also the built-in exception that a Python program expects in its place. The
engine's own errors map to these by name, in one function. ``str(error)`` names the place and both values.

Ctrl-C during a call raises Python's own ``KeyboardInterrupt``, not :class:`Cancelled`: a program that catches
``Exception`` to go on must not swallow it.
"""


class Error(Exception):
    """The root of everything this package raises on purpose."""


class InvalidArgument(Error, ValueError):
    """A value that the caller passed is out of its range."""


class NotFound(Error, FileNotFoundError):
    """A file, tensor, parameter, model or device that is not there."""


class Unsupported(Error, NotImplementedError):
    """Valid, but nothing here can do it."""


class DataCorrupted(Error, ValueError):
    """A file that contradicts its format or itself, or numbers that stopped being finite."""


class OutOfMemory(Error, MemoryError):
    """Host, device or cache memory is exhausted."""


class IoError(Error, OSError):
    """The operating system refused a read or a write."""


class DeviceError(Error, RuntimeError):
    """A device reported a failure."""


class Cancelled(Error):
    """The engine was asked to stop by something other than Ctrl-C."""
