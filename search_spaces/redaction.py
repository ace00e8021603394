"""What of a text may be shown or stored: no password, no token, nothing that works unseen.

Secrets are found by where they stand (in a URL, behind a name such as ``password=``), by how they
look (``hf_...``), and by being known: what `remember` was told, and the values of environment
variables whose names say that they are secret. Every pattern takes time in proportion to the text.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

STARS = "***"
"""What stands in a secret's place."""
_SHORTEST_KNOWN = 6
"""Characters below which a known secret is only found by where it stands: 'a' is in every word."""
_SHORT = 64
"""Characters up to which what became of a text is remembered: documents of many rows have the same
keys and words in each."""
_COMMON = re.compile(r"[a-z_][a-z0-9_.-]{0,14}")
"""Values of variables that are found by where they stand alone: stars in the place of a word that
everybody knows, as in ``"optimizer": "***"``, would tell them."""

_known: set[str] = set()


def remember(*secrets: str) -> None:
    """Let every text from here on be without these, however they are spelled in it."""
    _known.update(secrets)
    learn_environment()


def learn_environment() -> None:
    """Read the environment's secrets anew."""
    _spellings.cache_clear()
    _redact_again.cache_clear()


def redact(text: str) -> str:
    """Return a text with `***` for every secret in it. Applied again it changes nothing."""
    return _redact_again(text) if len(text) <= _SHORT else _redact(text)


@lru_cache(maxsize=4096)
def _redact_again(text: str) -> str:
    return _redact(text)


def _redact(text: str) -> str:
    for secret in _spellings():
        text = text.replace(secret, STARS)
    if _HINTS.search(text):
        for pattern in _PATTERNS:
            text = pattern.sub(_starred, text)
    return text


def redacted(value: Any, *, clean: Callable[[str], str] = redact) -> Any:
    """Return plain JSON values whose every text went through ``clean``, and whose secrets by name
    are stars."""
    # In the order in which they are frequent on a page of thousands of trials.
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        hidden = {
            key for key, part in value.items() if isinstance(part, str) and _is_secret_key(key)
        }
        return {
            redacted(key, clean=clean): STARS if key in hidden else redacted(part, clean=clean)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(item, clean=clean) for item in value]
    return value


def shown(text: str) -> str:
    """Return a text of the user's or of a library as it may be printed or drawn."""
    return visible(redact(text))


_BEYOND_ASCII = re.compile("[^\\n\\t -~]")
_UNSEEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_UNSEEN_LETTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")


def visible(text: str) -> str:
    """Return text in which nothing works unseen: ``\\u202e`` is written out for that character.

    So are control and format characters: what reverses the order of reading, what has no width,
    separators of lines and paragraphs, and halves of surrogate pairs. Line feeds and tabs stay.
    """

    def seen(found: re.Match[str]) -> str:
        character = found[0]
        is_unseen = unicodedata.category(character) in _UNSEEN_CATEGORIES
        if not is_unseen and character not in _UNSEEN_LETTERS:
            return character
        return character.encode("unicode_escape").decode()

    return _BEYOND_ASCII.sub(seen, text)


# Known secrets.

_SECRET_VARIABLE = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|SECRET|(?:^|_)(?:TOKEN|KEY|PAT|PASS|PW|CREDENTIALS?|APIKEY)$"
)
_NAMES_A_PLACE = ("FILE", "PATH", "DIR", "SOCK", "PROMPT", "COMMAND", "ASKPASS")
_PASSWORD_OF_URL = re.compile(r"[A-Za-z][\w+.-]{1,39}://[^:/@\s]{0,256}:(.+)@", re.DOTALL)


def _environment_secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        upper = name.upper()
        if found := _PASSWORD_OF_URL.match(value):
            yield found[1]
        elif (
            _SECRET_VARIABLE.search(upper)
            and not upper.endswith(_NAMES_A_PLACE)
            and not (value.startswith(("/", "~/")) and upper.endswith(("KEY", "CREDENTIALS")))
        ):
            yield value


@cache
def _spellings() -> tuple[str, ...]:
    """Return known secrets as they are quoted in URLs, JSON, reprs, SQL and HTML, longest first."""
    secrets = {secret for secret in _known if not re.fullmatch("[a-z_-]{1,15}", secret)}
    for secret in _environment_secrets():
        if not _COMMON.fullmatch(secret):
            secrets.add(secret)
    if not secrets:
        return ()
    # Imported here: most commands never know a secret.
    import html

    quoted: tuple[Callable[[str], str], ...] = (
        lambda text: quote(text, safe="", errors="replace"),
        lambda text: quote(text, errors="replace"),
        lambda text: quote_plus(text, errors="replace"),
        lambda text: repr(text)[1:-1],
        lambda text: json.dumps(text)[1:-1],
        lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
        lambda text: text.replace("'", "''"),
        html.escape,
        visible,
    )
    found = set()
    for secret in secrets:
        if len(secret) >= _SHORTEST_KNOWN:
            plain = {secret, unquote(secret)}
            found |= plain | {spelled(form) for form in plain for spelled in quoted}
    return tuple(sorted(found, key=len, reverse=True))


# Secrets by where they stand and how they look: the group `secret` goes, or the whole.

_NAME = (
    r"(?:(?i:pass(?:word|wd|phrase)|(?<![a-z])secret|authorization|(?<![\w-])(?:set-)?cookie"
    r"|(?:api|access|private|account|encryption|signing|secret)[_-]?key"
    r"|(?:access|refresh|auth|api|session|security|bearer|private|hf|hub|oauth|csrf)[_-]?token"
    r"|x-(?:amz|goog)-(?:signature|credential))"
    r"|(?<=[A-Z0-9]_)(?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)(?:TOKEN|KEY|PAT|PASS|PW|APIKEY))"
)
_SECRET_KEY = re.compile(rf"{_NAME}\Z")
_PATTERNS = (
    re.compile(
        r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----)[\w+/=\s\\:,.-])*+"
        r"(?:-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----)?"
    ),
    # In a URL the last '@' of a line ends a password; what reads as a port is none.
    re.compile(
        r"(?:(?<=://)|(?<=:\\/\\/))[^:/\s\"'`]{0,256}:(?!\d{1,5}(?:[/?#,\s][^@\n]{0,999}\s|[\s,]|\Z))"
        r"(?P<secret>[^\n\"`]{1,999})(?=@)"
    ),
    re.compile(r"(?i:%3a%2f%2f)[^%\s:/@]{0,128}(?i:%3a)(?P<secret>[^\s&\"']{1,200})(?=%40)"),
    re.compile(r"(?im:^[ \t-]{0,40}(?:password|authorization|(?:set-)?cookie): )(?P<secret>.++)"),
    re.compile(
        rf"{_NAME}\\?[\"']?(?:[ \t]{{0,4}}(?:=>|:=|=|:)[ \t\r\n]{{0,4}}|[ \t]{{1,4}}(?='))"
        r"[rbuf]{0,2}"
        r"(?![\"']{2}|(?:True|False|None|null|true|false)\b)(?P<open>\\?[\"'])?"
        r"(?P<secret>(?(open)(?:''|'\"'\"'|(?!(?P=open))(?:\\.|[^\n]))++|[^\s&\"']*[^\s&\"',;.)}\]>]))"
    ),
    re.compile(
        r"[?&;](?i:token|key|sig|signature|pwd|auth|code|jwt|pass(?!file)\w{0,12})="
        r"(?P<secret>[^\s&\"']++)"
    ),
    # A token that is no tokenizer's.
    re.compile(
        r"(?<![\w-])(?i:token)(?:=|\\?[\"']: ?)\\?[\"']?(?P<secret>(?!\d+\b)[\w.~+/=-]{6,}+)"
    ),
    re.compile(
        r"--(?:[a-z]{1,12}-)?(?:password|passwd|secret|api-key|token)(?:=|\s{1,4})"
        r"(?P<secret>[^\s-]\S*+)"
    ),
    re.compile(r"(?<!\w)login\s{1,4}\S{1,100}\s{1,4}password\s{1,4}(?P<secret>\S++)"),
    re.compile(r"(?i:bearer) {1,4}(?P<secret>[\w.~+/=-]{8,}+)"),
    re.compile(
        r"(?i:basic) {1,4}(?P<secret>(?=[A-Za-z+/][a-z]{0,7}[A-Z0-9+/=])[A-Za-z0-9+/]{8,}+=*)"
    ),
    re.compile(r"(?:hooks\.slack\.com/services/|/api/webhooks/\d{1,25}/)(?P<secret>[\w/-]{8,}+)"),
    re.compile(
        r"hf_(?:(?=[a-z]{0,14}[0-9A-Z])[A-Za-z0-9]{8,}+|[a-z]{20,}+)|api_org_\w{16,}+"
        r"|(?<![A-Za-z0-9])(?:sk-[\w-]{16,}+|[sr]k_(?:live|test)_\w{10,}+|gsk_\w{20,}+"
        r"|gl(?:pat|dt|rt|ptt|ft|cbt|soat)-[\w.-]{10,}+|xox[a-z]-[\w-]{8,}+|xapp-[\w-]{8,}+"
        r"|A(?:KI|SI|RO|ID)A[A-Z0-9]{12,}+|AIza[\w-]{30,}+|npm_\w{30,}+|pypi-[\w-]{30,}+"
        r"|ya29\.[\w-]{16,}+|rpa_\w{20,}+|r8_\w{20,}+|nvapi-[\w-]{20,}+|wandb_v1_\w{20,}+"
        r"|dop_v1_\w{20,}+|hvs\.[\w-]{16,}+)"
        r"|gh[pousr]_[A-Za-z0-9]{16,}+|github_pat_\w{16,}+"
        r"|(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{4,}+(?:\.[\w-]*+)?"
    ),
)
_HINTS = re.compile(
    r"(?i:://|:\\/\\/|%3a%2f|[?&;]\w+=|--|pass|secret|authorization|cookie|_?key|token|signature"
    r"|credential|bearer|basic|hf_|api_org_|[sr]k[-_]|gsk_|gl[a-z]+-|xox|xapp-|a(?:ki|si|ro|id)a|aiza"
    r"|npm_|pypi-|ya29|rpa_|r8_|nvapi-|wandb_|dop_|hvs\.|gh[pousr]_|github_pat_|eyj|_pat|_pw"
    r"|hooks)"
)
"""Of which one is in every text that has a secret by its form or place."""


def _starred(found: re.Match[str]) -> str:
    if "secret" not in found.re.groupindex:
        return STARS
    begin, end = found.span("secret")
    return found[0][: begin - found.start()] + STARS + found[0][end - found.start() :]


@cache
def _is_secret_key(key: object) -> bool:
    return isinstance(key, str) and _SECRET_KEY.search(key) is not None
