"""Which faults a retry can mend, and what to do about the others.

Requests to storage are retried with backoff where they are made, by s3fs and botocore. What still fails is sorted here:
transient faults become a RecoverableError, which the tasks hand to Flyte as the one error that it retries; lasting ones
a StorageError that names the place (bucket and key, or path) and the remedy.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError


class RecoverableError(RuntimeError):
    """Something outside the program went wrong; what was done is saved as far as it can be, and a retry goes on."""


class PreemptedError(RecoverableError):
    """The process was asked to end."""


class StorageError(RuntimeError):
    """Storage refuses for good: no retry would help. The message names the place and the remedy."""


_NO_RIGHTS = "permission is denied: check the rights of this user, or the credentials (AWS_…) and the bucket's policy"
REMEDIES: dict[int | str, str] = {
    errno.ENOSPC: "the disk is full: free space, or move `output`; what was complete before is untouched",
    errno.EDQUOT: "the disk quota is used up: free space, or move `output`; what was complete before is untouched",
    errno.EROFS: "the file system is read-only: set `output` to a place that can be written",
    errno.EACCES: _NO_RIGHTS,
    errno.EPERM: _NO_RIGHTS,
    "AccessDenied": _NO_RIGHTS,
    "403": _NO_RIGHTS,
    "NoSuchBucket": "there is no such bucket: create it, or correct the URL",
    "InvalidAccessKeyId": "the access key is unknown: check AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": "the secret key does not fit: check AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "the credentials have expired: renew them",
}
TRANSIENT = {
    errno.EIO,
    errno.EBUSY,
    errno.EAGAIN,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.EPIPE,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
}


@contextmanager
def named_faults(place: str) -> Iterator[None]:
    """Turns what storage raises about `place` into RecoverableError or StorageError; everything else passes."""
    try:
        yield
    except (RecoverableError, StorageError):
        raise
    except Exception as error:
        causes = list(_chain(error))
        for cause in causes:
            if remedy := REMEDIES.get(_code(cause)):
                path = getattr(cause, "filename", None) or place
                raise StorageError(f"{path}: {remedy} ({_short(error)})") from error
        if any(map(_is_transient, causes)):
            raise RecoverableError(f"{place}: storage failed, a retry may succeed: {_short(error)}") from error
        raise


@contextmanager
def task_faults(place: str) -> Iterator[None]:
    """Around the whole of a Flyte task that works on `place`: what a retry can mend is what Flyte retries."""
    from flytekit.exceptions.user import FlyteRecoverableException

    try:
        with named_faults(place):
            yield
    except RecoverableError as error:
        raise FlyteRecoverableException(str(error)) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_ERRNO = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")


def _code(error: BaseException) -> int | str | None:
    if isinstance(error, NoCredentialsError):
        return "403"
    if isinstance(error, ClientError):
        return error.response.get("Error", {}).get("Code")
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _ERRNO.search(str(error))  # of libraries that have no errno, and of other processes
    return int(found[1] or found[2]) if found else None


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or _code(error) in ("SlowDown", "RequestTimeout", "Throttling")
    return _code(error) in TRANSIENT or isinstance(
        error, BotoCoreError | asyncio.TimeoutError | TimeoutError | ConnectionError
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
