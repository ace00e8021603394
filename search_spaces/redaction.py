"""Owns what of a text may be shown or stored: no password, no token, nothing that works unseen.

Knows nothing of who shows it. Secrets are found by where they stand (in a URL, behind a name such
as ``password=``, in a header), by how they look (``hf_...``), and by being known: what `remember`
was told, and the values of environment variables whose names say that they are secret. Where it
cannot be told how far a secret goes, too much is taken out rather than too little. Every pattern
takes time in proportion to the text, whatever the text.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

STARS = "***"
"""What stands in a secret's place."""
_SHORTEST_KNOWN = 6
"""Characters below which a known secret is only found by where it stands: 'a' is in every word."""

_PASSES_MAX = 8

_known: set[str] = set()


def remember(*secrets: str) -> None:
    """Let every text from here on be without these, however they are spelled in it."""
    _known.update(secret for secret in secrets if len(secret) >= _SHORTEST_KNOWN)


def redact(text: str) -> str:
    """Return a text with `***` for every secret in it. Applied again it changes nothing."""
    for remove in _removals(len(os.environ), len(_known)):
        text = remove(text)
    lower = text.lower()
    if not any(map(lower.__contains__, _HINTS)):
        return text
    # Where a secret was taken out, what is around it may read as another one.
    for _ in range(_PASSES_MAX):
        before, text = text, _without_guessed(text)
        if text == before:
            break
    return text


def _without_guessed(text: str) -> str:
    """Return text without what stands or looks like a secret."""
    for step in (_without_key_blocks, _without_url_passwords, _without_named, _without_shapes):
        text = step(text)
    return text


def learn_environment() -> None:
    """Read the environment's secrets anew; a variable that is added or removed is noticed alone."""
    _removals.cache_clear()


def redacted(value: Any, *, clean: Callable[[str], str] = redact) -> Any:
    """Return plain JSON values whose every text went through ``clean``, and whose secrets by name
    are stars."""

    def within(value: Any) -> Any:
        # In the order in which they are frequent on a page of thousands of trials.
        match value:
            case str():
                return clean(value)
            case int() | float() | None:
                return value
            case dict() | Mapping():
                return {
                    within(key): STARS
                    if isinstance(part, str) and _is_secret_key(key)
                    else within(part)
                    for key, part in value.items()
                }
            case list() | tuple():
                return [within(part) for part in value]
            case _:
                return value

    return within(value)


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
    return _BEYOND_ASCII.sub(lambda found: _seen(found[0]), text)


def _seen(character: str) -> str:
    is_unseen = unicodedata.category(character) in _UNSEEN_CATEGORIES
    if not is_unseen and character not in _UNSEEN_LETTERS:
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# Known secrets.

_SECRET_VARIABLE = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|SECRET|(?:^|_)(?:TOKEN|KEY|PAT|PASS|PW|CREDENTIALS?|APIKEY)$"
)
_NAMES_A_PLACE = ("FILE", "PATH", "DIR", "SOCK", "PROMPT", "COMMAND", "ASKPASS")
_URL_PASSWORD = re.compile(r"[A-Za-z][\w+.-]{1,39}://[^:/@\s]{0,256}:(.+)@", re.DOTALL)
_WORDS = """
    password postgres secret token example attention kernels compile packing optimizer quantization
    double_quant lora_rank seq_len all-linear packed grouped flash_attention_2 fused-loss model
    number config verdict crashed pruned_slow diverged invalid ineffective timed_out predicted_oom
    dominated_oom trials study search baseline measurement objective seconds speed memory confirmed
    tokens_per_second step_seconds
"""
_MEANS_NOTHING = frozenset(_WORDS.split())
"""Passwords that are words of our own messages and documents: hidden where they stand as one, left
elsewhere, as stars in the place of a word that everybody knows would tell the password."""


@cache
def _is_secret_variable(name: str) -> bool:
    upper = name.upper()
    return _SECRET_VARIABLE.search(upper) is not None and not upper.endswith(_NAMES_A_PLACE)


def _environment_secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        found = _URL_PASSWORD.match(value)
        secret = found[1] if found else value if _is_secret_variable(name) else ""
        is_path = secret.startswith(("/", "~/")) and name.upper().endswith(("KEY", "CREDENTIALS"))
        if len(secret) >= _SHORTEST_KNOWN and not is_path:
            yield secret


@lru_cache(maxsize=1)
def _removals(variables: int, told: int) -> tuple[Callable[[str], str], ...]:
    """Return what takes out every spelling of known secrets, the longest first.

    Args:
        variables: how many the environment has; another number is another environment.
        told: how many secrets `remember` was told.
    """
    secrets = {*_known, *_environment_secrets()}
    known = {one for secret in secrets for one in _spelled(secret)} - _MEANS_NOTHING
    return tuple(map(_removal, sorted(known, key=len, reverse=True)))


def _spelled(secret: str) -> set[str]:
    """Return a secret as it is quoted in URLs, JSON, reprs, SQL, HTML, and in one in another."""
    # Imported here: most commands never know a secret.
    import html
    import json
    from urllib.parse import quote, quote_plus, unquote

    def quote_all(text: str) -> str:
        return quote(text, safe="", errors="replace")

    spellings: tuple[Callable[[str], str], ...] = (
        quote_all,
        lambda text: re.sub("%..", lambda found: found[0].lower(), quote_all(text)),
        lambda text: quote(text, errors="replace"),
        lambda text: quote_plus(text, errors="replace"),
        lambda text: repr(text)[1:-1],
        lambda text: json.dumps(text)[1:-1],
        lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
        lambda text: text.replace("\\", "\\\\").replace("'", "\\'"),
        lambda text: text.replace("'", "''"),
        lambda text: text.replace("'", "'\"'\"'"),
        html.escape,
        visible,
    )
    forms = {secret, unquote(secret)}
    for _ in range(2):
        forms |= {spell(form) for form in forms for spell in spellings}
    return {form for form in forms if len(form) >= _SHORTEST_KNOWN}


def _removal(secret: str) -> Callable[[str], str]:
    """Return what replaces a secret, as a word of its own where it could be part of others."""
    if not (secret.isalpha() and secret.islower() and len(secret) < 12):
        return lambda text: text.replace(secret, STARS)
    word = re.compile(rf"(?:(?<![a-zA-Z])|(?<=\\[nrt])){re.escape(secret)}(?![a-zA-Z])")
    return lambda text: word.sub(STARS, text) if secret in text else text


# Private keys.

_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----)[\w+/=\s\\:,.-])*+"
    r"(?:-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----)?"
)


def _without_key_blocks(text: str) -> str:
    return _KEY_BLOCK.sub(STARS, text) if "PRIVATE KEY" in text else text


# Passwords in URLs.

_SEPARATOR = re.compile(r"://|:\\/\\/")
_SCHEME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-"
_PATH_SCHEMES = ("sqlite", "file")
_WEB_SCHEMES = frozenset({"http", "https", "git+https", "git+http", "ws", "wss"})
_NEXT_URL = re.compile(r"[\s\"'`<>()\[\]{},;|=](?=[A-Za-z][A-Za-z0-9+.\-]{1,39}:(?://|\\/\\/))")
_USER = re.compile(r"[^:/?#\s]{0,256}")
_BRACKETED = re.compile(r"\[[0-9A-Fa-f:.]{2,45}(?:%\w{1,20})?\]")
_LONE_TOKEN = re.compile(r"[\w~.+=-]{16,256}(?=@)")
_PORT = re.compile(r"\d{0,5}(?=[/?#\s,;:'\"`)\]}>|.]|$)")
_OPTIONS_FOLLOW = re.compile(r"\d{1,5}/[^?@\s]{0,200}\?")
_HOST = re.compile(r"(?:.*@)?(?:localhost|\[.*\]|[\w-]+(?:\.[\w-]+)+)\Z", re.IGNORECASE)
_BLANK = re.compile(r"\s")
_LONGEST_WORD = 4096
_CLOSING = frozenset(" \t\r\n,;:.)]}>?!&|")
_FURTHER_LINES, _FURTHER_CHARACTERS = 3, 300
"""How far a password is followed that goes on in the next line."""
_ENCODED = re.compile(r"(%3a%2f%2f[^%\s:/@]{0,128}%3a)[^\s&\"']{1,200}(?=%40)", re.IGNORECASE)


def _without_url_passwords(text: str) -> str:
    """Return text with stars for what is between ``scheme://user:`` and the last ``@``.

    A password may hold ``@``, ``/``, ``:``, quotes and spaces unescaped, so that the last ``@``
    of the quotation counts, or of the line.
    """
    if "@" not in text:
        return text if "%40" not in text else _ENCODED.sub(rf"\1{STARS}", text)
    parts: list[str] = []
    copied, start, region, last = 0, 0, 0, -1
    while found := _SEPARATOR.search(text, start):
        start = found.end()
        if start >= region:
            region = _region_end(text, start)
            last = text.rfind("@", start, region)
        span = _password_span(text, found, region=region, last=last)
        if span is None:
            continue
        parts += [text[copied : span[0]], STARS]
        copied = start = span[1]
    text = "".join((*parts, text[copied:]))
    return text if "%40" not in text else _ENCODED.sub(rf"\1{STARS}", text)


def _region_end(text: str, start: int) -> int:
    """Return where at the latest a URL ends: with its line, or where another one begins."""
    line = text.find("\n", start)
    end = len(text) if line < 0 else line
    following = _NEXT_URL.search(text, start, end)
    return end if following is None else following.start()


def _password_span(
    text: str, separator: re.Match[str], *, region: int, last: int
) -> tuple[int, int] | None:
    """Return where the password of the URL around ``://`` stands; None where it has none."""
    head = text[max(0, separator.start() - 40) : separator.start()]
    bare = head.rstrip(_SCHEME_CHARACTERS)
    scheme = head[len(bare) :].lower()
    start = separator.end()
    if scheme.startswith(_PATH_SCHEMES) or _BRACKETED.match(text, start):
        return None
    is_web = scheme in _WEB_SCHEMES
    user = _USER.match(text, start)
    assert user is not None
    if text[user.end() : user.end() + 1] != ":":
        token = _LONE_TOKEN.match(text, start) if is_web else None
        return token and token.span()
    begin = user.end() + 1
    end = _end_of_password(text, begin, quote_mark=bare[-1:], region=region, last=last)
    if _is_host(text, user[0], begin, end=end, is_web=is_web):
        return None
    return None if end is None else (begin, end)


def _end_of_password(
    text: str, begin: int, *, quote_mark: str, region: int, last: int
) -> int | None:
    """Return the place of the ``@`` that ends a password."""
    if quote_mark and quote_mark in "\"'`":
        end = _end_within_quotes(text, begin, mark=quote_mark, region=region)
        if end is not None:
            return end
    if last >= begin:
        return last
    if region < len(text) and text[region] != "\n":
        return None
    return _end_in_further_lines(text, begin, region)


def _end_within_quotes(text: str, begin: int, *, mark: str, region: int) -> int | None:
    """Return the last ``@`` before the quotation closes."""
    close = begin - 1
    while (close := text.find(mark, close + 1, region)) >= 0:
        is_end = close + 1 == len(text) or text[close + 1] in _CLOSING
        if is_end and text[close - 1] != "\\":
            at = text.rfind("@", begin, close)
            if at >= 0:
                return at
    return None


def _end_in_further_lines(text: str, begin: int, region: int) -> int | None:
    if _PORT.match(text, begin):
        return None
    end = region
    for _ in range(_FURTHER_LINES):
        limit = region + _FURTHER_CHARACTERS
        line = text.find("\n", end + 1, limit)
        end = min(len(text), limit) if line < 0 else line
        at = text.rfind("@", region, end)
        if at >= 0:
            return None if _SEPARATOR.search(text, region, at) else at
    return None


def _is_host(text: str, user: str, begin: int, *, end: int | None, is_web: bool) -> bool:
    """Whether what looks like ``user:password`` is a host with its port."""
    if _PORT.match(text, begin) is None:
        return False
    if end is None or _OPTIONS_FOLLOW.match(text, begin, end):
        return True
    if _HOST.match(user) is None and "@" not in user:
        return False
    return is_web or _BLANK.search(text, begin, min(end, begin + _LONGEST_WORD)) is not None


# Secrets behind their names.

_STRONG = (
    r"(?i:pass(?:word|wd|phrase)|(?<![A-Za-z])secret(?:[_-]?access)?(?:[_-]?key)?"
    r"|(?:api|access|private|account|encryption|signing)[_-]?key|authorization"
    r"|(?:access|refresh|auth|api|session|security|bearer|private|hf|hub|oauth|csrf)[_-]?token"
    r"|x-amz-(?:signature|credential)|x-goog-(?:signature|credential)|set-cookie|(?<![\w-])cookie)"
)
_VARIABLE = (
    r"(?:(?<=[A-Z0-9]_)(?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)(?<!CLS_)(?<!SEP_)(?<!MASK_)"
    r"(?:TOKEN|KEY|PAT|PASS|PW|APIKEY))"
)
_IN_QUERY = (
    r"(?:(?<=[?&;])(?i:token|key|sig|signature|pwd|auth|code|jwt|pass(?!file)\w{0,12}|psswo?r?d))"
)
"""A password's name mistyped too: where no server knows it, the error quotes it."""
_PLAIN_TOKEN = r"(?:(?<![\w-])(?i:token))"
_ONE_QUOTED = (
    r"\"(?:[^\"\\]|\\.){0,1000}+\"|'(?:[^'\\]|\\.){0,1000}+'"
    r"|\\\"(?:[^\"\\]|\\[^\"]){0,1000}+\\\"|\\'(?:[^'\\]|\\[^']){0,1000}+\\'"
)
_QUOTED = rf"(?:{_ONE_QUOTED})(?:{_ONE_QUOTED}|\\[\"'](?=[\"']))*+"
"""Pieces that a shell or SQL puts together: ``'it'"'"'s'``, ``'it''s'``."""
_UNQUOTED = r"(?:\\.|[^\s&\\\"']|[\"'](?![\s,;:)\]}>]|\Z))++"
_CONSTANTS = r"(?![\"']{2}|(?:True|False|None|null|true|false)\b|\*\*\*)"
_NAMED = re.compile(
    rf"(?P<name>{_STRONG}|{_VARIABLE}|{_IN_QUERY}|{_PLAIN_TOKEN})(?P<close>\\?[\"'])?"
    rf"(?P<sep>[ \t]{{0,4}}(?:=>|:=|=|:)[ \t\r\n]{{0,4}}|[ \t]{{1,4}}(?=')){_CONSTANTS}"
    rf"(?:[rbuf]{{0,2}}(?P<quoted>{_QUOTED})|(?P<open>[\"'][^\n]*+)|(?P<plain>{_UNQUOTED}))",
    re.DOTALL,
)
_OPTION = re.compile(
    r"(?<=--)((?:[a-z]{1,12}-)?(?:password|passwd|secret|api-key)"
    r"|(?:hf-|auth-|access-|api-)?token)(\s{1,4})(?!-)(\"[^\"\n]*+\"|'[^'\n]*+'|[^\s\"']++)"
)
_HEADER = re.compile(r"[^\n\"']*+")
_TRAILING = ",;)]}>.\"'`"


def _without_named(text: str) -> str:
    parts: list[str] = []
    copied = start = 0
    while found := _NAMED.search(text, start):
        begin, end, stars = _named_span(text, found)
        if begin < end:
            parts += [text[copied:begin], stars]
            copied = end
        start = max(end, found.end("sep"))
    text = "".join((*parts, text[copied:]))
    return _OPTION.sub(rf"\1\2{STARS}", text) if "--" in text else text


def _named_span(text: str, found: re.Match[str]) -> tuple[int, int, str]:
    """Return where the value behind a name stands and what replaces it; nothing where it is none.

    A whole line counts for a header, and in YAML, where the name is all that stands before it.
    """
    name = found["name"].lower()
    kind = found.lastgroup or "plain"
    begin, end = found.span(kind)
    if name == "token" and not _is_token(found, text):
        return begin, begin, ""
    if kind == "quoted":
        mark = 2 if text[begin] == "\\" else 1
        return begin + mark, end - mark, STARS
    if kind == "open":
        return begin + 1, end, STARS
    is_line = ":" in found["sep"] and _begins_its_line(text, found.start("name"))
    if name in ("authorization", "cookie", "set-cookie") or (is_line and not found["close"]):
        line = _HEADER.match(text, begin)
        end = max(end, line.end()) if line is not None else end
    value = text[begin:end].rstrip()
    end = begin + (len(value.rstrip(_TRAILING)) or len(value))
    stars = f'"{STARS}"' if found["close"] == '"' else STARS
    return begin, end, stars


def _begins_its_line(text: str, start: int) -> bool:
    head = text[max(0, start - 80) : start].rpartition("\n")[2]
    return re.fullmatch(r"[ \t]{0,40}(?:- {1,4})?[\w-]{0,40}", head) is not None


def _is_token(found: re.Match[str], text: str) -> bool:
    """Whether the word is a credential: to a tokenizer it is the text of a word."""
    before = text[found.start() - 1 : found.start()]
    if before in ("?", "&") and found.start() > 0:
        return True
    if ":" in found["sep"] and not found["close"]:
        return False
    value = (found["quoted"] or found["plain"] or "").strip("\"'\\")
    return re.match(r"[\w.~+/=-]{8}", value) is not None and not value.isdigit()


@lru_cache(maxsize=1024)
def _is_secret_key(key: object) -> bool:
    return isinstance(key, str) and _SECRET_KEY.search(key) is not None


_SECRET_KEY = re.compile(rf"(?:{_STRONG}|{_VARIABLE})\Z")


# Secrets by their looks.

_SHAPES = re.compile(
    r"hf_(?:oauth_|jwt_)[\w.-]{8,}+|hf_(?:(?=[a-z]{0,7}[0-9A-Z])[A-Za-z0-9]{8,}+|[A-Za-z0-9]{14,}+)"
    r"|api_org_[A-Za-z0-9]{16,}+"
    r"|(?<![A-Za-z0-9])(?:sk-[\w-]{16,}+|[sr]k_(?:live|test)_\w{10,}+|gsk_\w{20,}+"
    r"|gl(?:pat|dt|rt|ptt|ft|cbt|soat)-[\w.-]{10,}+|xox[a-z]-[\w-]{8,}+|xapp-[\w-]{8,}+"
    r"|A(?:KI|SI|RO|ID)A[A-Z0-9]{12,}+|AIza[\w-]{30,}+|npm_\w{30,}+|pypi-[\w-]{30,}+"
    r"|ya29\.[\w-]{16,}+|rpa_\w{20,}+|r8_\w{20,}+|nvapi-[\w-]{20,}+|wandb_v1_\w{20,}+"
    r"|dop_v1_\w{20,}+|hvs\.[\w-]{16,}+)"
    r"|gh[pousr]_[A-Za-z0-9]{16,}+|github_pat_\w{16,}+"
    r"|(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{4,}+(?:\.[\w-]*+)?"
)
_SCHEMED = re.compile(
    r"(?i:(?<![A-Za-z])(bearer)[ \t]{1,4})(?!\*)[\w.~+/=-]{8,}+"
    r"|(?i:(?<![A-Za-z])(basic)[ \t]{1,4})(?=[A-Za-z+/][a-z]{0,7}[A-Z0-9+/=])"
    r"[A-Za-z0-9+/]{8,}+={0,2}"
)
_NETRC = re.compile(r"((?<!\w)login\s{1,4}\S{1,100}\s{1,4}password\s{1,4})\S++")
_WEBHOOK = re.compile(r"(hooks\.slack\.com/services/|/api/webhooks/\d{1,25}/)[\w/-]{8,}+")


def _without_shapes(text: str) -> str:
    text = _SCHEMED.sub(lambda found: f"{found[1] or found[2]} {STARS}", text)
    text = _NETRC.sub(rf"\1{STARS}", text)
    return _WEBHOOK.sub(rf"\1{STARS}", _SHAPES.sub(STARS, text))


_HINTS = (
    *("://", ":\\/\\/", "%3a%2f", "pass", "token", "secret", "key", "auth", "cookie", "signature"),
    *("credential", "bearer", "basic", "webhook", "hooks.", "_pat", "_pw", "sig=", "pwd=", "code="),
    *("jwt=", "hf_", "api_org_", "sk-", "sk_", "rk_", "glpat-", "gldt-", "glrt-", "glptt-"),
    *("glft-", "glcbt-", "glsoat-", "xox", "xapp-", "akia", "asia", "aroa", "aida", "aiza"),
    *("npm_", "pypi-", "ya29.", "rpa_", "r8_", "nvapi-", "wandb_", "dop_", "hvs.", "ghp_"),
    *("gho_", "ghu_", "ghs_", "ghr_", "github_", "eyj"),
)
"""Of which one at least is in every text that has a secret which nobody was told of."""
