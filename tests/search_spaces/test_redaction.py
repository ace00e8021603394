"""What is a secret is nowhere in a text that was redacted; what is none stays as it was."""

from __future__ import annotations

import pytest

from search_spaces.redaction import redact

SECRET = "Zq7-xW9"


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://u:{SECRET}@h/db",
        f"POSTGRESQL+psycopg://:{SECRET}@h/db",
        f"postgres://u:a {SECRET}@[::1]:5432/db",
        f"mysql://u:a/{SECRET}:b@h1,h2:3306/db",
        f"redis://:a@b#{SECRET}?c@h/0",
        f"amqp://u@corp:{SECRET}@h",
        f"'postgresql://u:it's \"{SECRET}@h/db' is no database",
        f"postgresql://u:two\n{SECRET}@h/db",
        f"url=postgresql%3A%2F%2Fu%3A{SECRET}%40h%2Fdb&x=1",
        f"postgresql://h:5432/db?user=u&password={SECRET}",
        f"host=h password='a b\\' {SECRET}' user=u",
        f"PGPASSWORD={SECRET} psql",
        f'{{"password": "a \\" {SECRET}"}}',
        f"{{'sslpassword': 'a {SECRET}'}}",
        f"    password: two words {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"https://bucket/x?X-Amz-Signature={SECRET}&y=1",
        f"sweep login --token {SECRET}",
    ],
)
def test_a_secret_does_not_survive(text: str) -> None:
    assert SECRET not in redact(text)
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
        "hf_transfer and hf_quantizer of hf_hub_download",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text
