"""What is a secret is nowhere in a text that was redacted; what is none stays as it was."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qlora_sweep.search_spaces import redaction
from qlora_sweep.search_spaces.redaction import learn_environment, redact, redacted, remember
from tests.tables import cases

SECRET = "Zq7-xW9"


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    known = set(redaction._known)
    yield
    redaction._known.clear()
    redaction._known.update(known)
    learn_environment()


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://u:{SECRET}@h/db",
        f"POSTGRESQL+psycopg://:{SECRET}@h/db",
        f"mysql://u:a/{SECRET}:b@h1,h2:3306/db",
        f"redis://:a@b#{SECRET}?c@h/0",
        f"amqp://u@corp:{SECRET}@h",
        f"'postgresql://u:{SECRET}@h/db' is no database",
        f"postgresql://h:5432/db?user=u&password={SECRET}",
        f"postgresql://h:5432/db?user=u&passwrd={SECRET}",
        f"host=h password='a b\\' {SECRET}' user=u",
        f"PGPASSWORD={SECRET} psql",
        f'{{"password": "a \\" {SECRET}"}}',
        json.dumps(json.dumps({"api_key": SECRET})),
        f"{{'sslpassword': 'a {SECRET}'}}",
        f"secret = {SECRET.encode()!r}",
        f"    password: two words {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"https://bucket/x?X-Amz-Signature={SECRET}&y=1",
        f"sweep login --token {SECRET}",
        f"url=postgresql%3A%2F%2Fu%3A{SECRET}%40h%2Fdb&x=1",
        json.dumps(f"postgresql://u:12345/{SECRET}@h/db").replace("/", "\\/"),
        f"postgresql://u:a'{SECRET}@h/db",
        f"password=a,{SECRET}",
        f"ALTER USER u PASSWORD 'a''{SECRET}'",
        f"password:\n  {SECRET}",
        f"token={SECRET}",
        json.dumps({"token": SECRET}),
        f"machine h login u password {SECRET}",
        f"https://hooks.slack.com/services/{SECRET}/x",
        "hf_abcdefGH12345678",
        "sk_live_abcdefGH12345678",
        "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----",
    ],
)
def test_a_secret_does_not_survive(text: str) -> None:
    assert SECRET not in redact(text)
    assert redaction.STARS in redact(text)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "Qwen/Qwen2.5-7B, commit f3ee866a61c7f4d8a7a0a5c7a7f5e4c3b2a19087, 2026-11-22T01:03:12",
        "connecting to http://localhost:8080, or write to me@example.org",
        "https://github.com/owner/name/tree/v1@main",
        "postgresql://u@corp:5432/db and redis://cache:6379",
        "sqlite:////home/me/a:b@c/sweep.db",
        "git@github.com:owner/name.git",
        'password authentication failed for user "u"',
        "eos_token='</s>', pad_token=0, max_tokens=512, num_key_value_heads=8",
        "storage: a:b@c",
        "postgresql://h/db?passfile=/home/me/.pgpass&user=u",
        "hf_transfer and hf_quantizer of hf_hub_download",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@given(
    password=st.text(st.characters(exclude_categories=["Cs"]), min_size=6, max_size=30),
    around=st.text(alphabet=" x\n'\"@:/=,", max_size=5),
)
@settings(max_examples=50)
def test_a_password_that_is_known_survives_nowhere(password: str, around: str) -> None:
    assume(len(set(password) - {"*"}) > 2 and not re.fullmatch("[a-z_-]*", password))
    remember(password)
    for spelled in (repr, json.dumps, html.escape, lambda text: quote(text, safe="")):
        assert password not in redact(f"{around}{spelled(password)}{around}")


@pytest.mark.parametrize(
    ("name", "value", "secret", "text"),
    cases(
        """
        HF_TOKEN | Tuesday-17 | Tuesday | got Tuesday-17 and Tuesday-17
        PGPASSWORD | p@ss w/rd | p%40ss | no p%40ss%20w%2Frd here
        SWEEP_STORAGE | postgresql://u:b e/e@r@h/db | b e/e | "it said: b e/e@r"
        # What holds no secret, or a common word, hides nothing.
        PASSWORD_FILE | /run/secrets/db | "" | it is /run/secrets/db here
        TOKENIZERS_PARALLELISM | false-or-true | "" | it is false-or-true here
        MY_KEY | adamw_8bit | "" | it is adamw_8bit here
        """
    ),
)
def test_a_secret_of_the_environment_survives_nowhere(
    name: str, value: str, secret: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    learn_environment()
    assert (secret in redact(text)) is not bool(secret)
    assert (redact(text) == text) is not bool(secret)
    monkeypatch.undo()
    learn_environment()
    assert redact(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        *("a://b:c ", "'a://b:", "password='", "password=\\'", "%3a%2f%2f%3a", "hf_a"),
        *("-----BEGIN PRIVATE KEY-----", "https://a.b:1/", "tcp://a.b:1/ ", "Basic ", "@"),
        *("a@ b://c:1 ", "login a password ", "password=,", "--token "),
    ],
)
def test_time_grows_with_the_text_alone(piece: str) -> None:
    def seconds(length: int) -> float:
        text = (piece * length)[:length]
        began = time.process_time()
        redact(text)
        redact(f"{text}@")
        return time.process_time() - began

    # Eight times the text: with its square it would be 64 times.
    assert seconds(24_000) < 24 * max(seconds(3_000), 0.01)


def test_plain_values_are_redacted_leaf_by_leaf_and_stay_plain() -> None:
    values = {"a": ["postgresql://u:pw@h/db", 1, None], "password": "x", "n": {"token": 5}, "p": 1}
    clean = redacted(values)
    assert clean == values | {"a": ["postgresql://u:***@h/db", 1, None], "password": "***"}
    assert redacted(clean) == clean


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain, ünï, 中文, ✕, 😀", "plain, ünï, 中文, ✕, 😀"),
        ("gpj\u202e.exe", r"gpj\u202e.exe"),
        ("a\u2066b\u200bc\ufeffd\u2028e", r"a\u2066b\u200bc\ufeffd\u2028e"),
        ("\x1b[31mred\x07\r\x85", r"\x1b[31mred\x07\r\x85"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_works_unseen_is_written_out(text: str, seen: str) -> None:
    assert redaction.shown(text) == seen
