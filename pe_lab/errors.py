"""The errors that a user meets, by what they can do about them."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any


class UserError(ValueError):
    """Bad input: what was wrong, where, and what to do. A command prints the message and exits with status 2."""


class ConfigError(UserError):
    """A key, a flag or an argument is wrong: change it."""


class DataError(UserError):
    """Text, a tokenizer, prepared data or a results file is missing, damaged or does not fit: replace it."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit: give another one."""


class EncodingError(ConfigError):
    """An encoding is not registered, or has changed since a checkpoint was written: import the former one."""


class StoreError(UserError):
    """An object store is not there, refuses, or does not answer: check the bucket, the rights, the network."""


class StoreRefuses(StoreError):
    """An object store refuses the account."""


class UnsupportedError(UserError):
    """The input is valid, but this version, kernel or machine cannot do what it asks for: ask for something else."""


class TrainingDiverged(Exception):
    """The loss or its gradient is not finite. The input is valid: train again from an earlier checkpoint."""


class SaveFailed(Exception):
    """A checkpoint could not be written, for instance to a full disk. Earlier ones are whole: make space, train on."""


class SilentCorruption(Exception):
    """The same computation gave two results: the hardware is faulty. The message names the process and the device."""


@contextlib.contextmanager
def within(where: str) -> Iterator[None]:
    """Puts a place before the message of a `UserError` of the block."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{where}: {error}") from None


def did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """`Did you mean 'x'?` for the nearest allowed name, else the list of what is allowed."""
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"Allowed: {', '.join(sorted(allowed))}."


def excerpt(text: str, most: int = 300) -> str:
    """The beginning of a text for a message: where more follows it ends in `...`, and after a whole word or number.

    A single word of more than `most` characters is cut.
    """
    if len(text) <= most:
        return text
    kept = text[:most] if text[most].isspace() else text[:most].rpartition(" ")[0]
    return f"{kept.rstrip() or text[:most]}..."


_LOGIN_IN_ADDRESS = re.compile(r"""(\b[a-z][a-z0-9+.-]*://)[^/\s'"<>]*@""", re.IGNORECASE)
_QUERY = re.compile(r"""[?&#;][^\s'"<>]+""")
_SECRET = re.compile(
    r"""([?&#;](?:[\w.~%-]*(?:sig|signature|token|secret|passw(?:or)?d|pwd|credentials?|auth|authorization|jwt|bearer"""
    r"""|hmac|session[-_.]?id|access[-_.]?id)|[\w.~%-]*(?:api|access|account|shared|secret|private|app|auth"""
    r"""|subscription|functions?)[-_.]?key(?:[-_.]?id)?|key-pair-id)=)[^&#;]+""",
    re.IGNORECASE,
)
_POLICY = re.compile(r"([?&#;]policy=)[^&#;]+", re.IGNORECASE)  # of a signed address of CloudFront
_SIGNED = re.compile(r"[?&#;]signature=", re.IGNORECASE)
# The key of an interface, as Google's; or the name of an object, if it ends as a file does.
_KEY = re.compile(r"([?&#;]key(?:[-_.]?id)?=)(?![^&#;]*\.[a-z][a-z0-9]{0,7}(?:[&#;]|$))[^&#;]+", re.IGNORECASE)


def redacted(text: str) -> str:
    """A text in which the credentials of addresses are `***`: of `scheme://USER:PASSWORD@HOST`, and in queries.

    In a query these are signatures, tokens, keys and passwords, as X-Amz-Signature, X-Goog-Credential, sig or token. It
    is for whatever is shown or written: addresses are read as they are.
    """
    return _QUERY.sub(lambda query: _KEY.sub(r"\1***", _without_secrets(query[0])), _without_login(text))


def resource(address: str) -> str:
    """What an address names, for digests and never to be shown: alike for every login and signature.

    A value of `key` stays, which `redacted` may hide: it may be the name of the object.
    """
    return _QUERY.sub(lambda query: _without_secrets(query[0]), _without_login(address))


def _without_login(text: str) -> str:
    return _LOGIN_IN_ADDRESS.sub(r"\1***@", text)


def _without_secrets(query: str) -> str:
    query = _POLICY.sub(r"\1***", query) if _SIGNED.search(query) else query
    return _SECRET.sub(r"\1***", query)


_STORE_LIBRARIES = ("gcsfs", "s3fs", "aiobotocore", "botocore")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound")
_LOGIN = (
    "gs:// takes those of `gcloud auth application-default login`, GOOGLE_APPLICATION_CREDENTIALS or the machine's "
    "service account; s3:// those of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or the machine's role."
)


def store_failure(error: BaseException, where: str = "") -> StoreError | None:
    """What an exception that a store's library raised means for a user; None for an exception of anything else.

    Args:
      error: what was raised.
      where: the address that was read or written.
    """
    chain = causes(error)
    if not any(module.split(".")[0] in _STORE_LIBRARIES for e in chain for module in _modules(e)):
        return None
    names = {type(e).__name__ for e in chain}
    text = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    text = excerpt(text)
    codes = {str(getattr(e, "code", "") or getattr(e, "status", "")) for e in chain}
    at = f"'{where}'" if where else "The object store"
    if names & set(_NO_CREDENTIALS) or "401" in codes or "Unauthorized" in text:
        return StoreError(f"{at}: there are no credentials, or they are not valid ({text}). {_LOGIN}")
    if isinstance(error, PermissionError) or text.startswith("Forbidden") or "403" in codes:
        return StoreRefuses(
            f"{at}: the store refuses this account ({text}). Ask for rights on the bucket, or log in anew."
        )
    if isinstance(error, FileNotFoundError):
        return StoreError(f"{at}: there is no such bucket or object ({text}). Check the address.")
    return StoreError(
        f"{at}: the store does not answer as it should, also after several attempts ({text}). Nothing is half-written: "
        "repeat the command once the network or the store works again."
    )


def _modules(error: BaseException) -> Iterator[str]:
    """The modules that an exception came through."""
    frame = error.__traceback__
    while frame is not None:
        yield frame.tb_frame.f_globals.get("__name__", "")
        frame = frame.tb_next


def causes(error: BaseException | None) -> list[BaseException]:
    """The exception, and those that led to it, the last one first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def is_external(kind: Any) -> bool:
    """Whether a class or a function is not pe_lab's own."""
    return (getattr(kind, "__module__", None) or "").partition(".")[0] != "pe_lab"


def call(owner: Any, method: str, *arguments: Any, **settings: Any) -> Any:
    """The result of `owner.method(...)`, or of `owner(...)` where `method` is empty.

    Raises:
      ConfigError: code from outside raised an error; says which and in which line.
    """
    function = getattr(owner, method) if method else owner
    kind = type(owner) if method else owner
    while isinstance(kind, functools.partial):
        kind = kind.func
    kind = kind if hasattr(kind, "__qualname__") else type(kind)
    try:
        return function(*arguments, **settings)
    except UserError:
        raise
    except Exception as error:
        if not is_external(kind):
            raise
        lines = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        at = next((line for line in reversed(lines) if line.filename == file), lines[-1])
        message = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        raise ConfigError(
            f"{kind.__qualname__}{method and '.'}{method} raised {type(error).__name__}: {message} "
            f"({at.filename}, line {at.lineno}: {at.line})"
        ) from error
