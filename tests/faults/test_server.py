"""What befalls a PostgreSQL server while studies run, fifty at once too: they outlast it alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from qlora_sweep.storage.directory import Spool
from qlora_sweep.storage.reading import read_study
from tests.faults.driving import PATIENCE_SECONDS, a_driver, finish, said, wait_until
from tests.faults.short_study import Place
from tests.storage import driver, postgres
from tests.storage.proxy import Proxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

_OTHERS = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"


@pytest.fixture
def place(cluster: postgres.Cluster, tmp_path: Path) -> Place:
    return Place(tmp_path, server=cluster.new_database())


Trouble = Callable[[postgres.Cluster, Proxy], None]


def cancel(cluster: postgres.Cluster, _: Proxy) -> None:
    for _again in range(30):
        cluster.execute(f"SELECT pg_cancel_backend(pid) {_OTHERS}")


def read_only(cluster: postgres.Cluster, _: Proxy) -> None:
    for value in ("on", "off"):
        cluster.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
        cluster.execute("SELECT pg_reload_conf()")
        time.sleep(1.0)


def during(silence: AbstractContextManager[None]) -> None:
    with silence:
        time.sleep(3.0)


def refuse(_: postgres.Cluster, proxy: Proxy) -> None:
    proxy.refuse()
    proxy.cut()
    time.sleep(2.0)
    proxy.listen()


TROUBLES: dict[str, tuple[Trouble, int]] = {
    "connections terminated": (
        lambda cluster, _: cluster.execute(f"SELECT pg_terminate_backend(pid) {_OTHERS}"),
        5,
    ),
    "queries cancelled": (cancel, 5),
    "read-only for a second": (read_only, 2),
    "restarted as after a crash": (lambda cluster, _: cluster.restart(), 5),
    "stopped for three seconds": (lambda cluster, _: during(cluster.stopped_in_its_tracks()), 2),
    "packets dropped for three seconds": (lambda _, proxy: during(proxy.silent()), 2),
    "connections cut": (lambda _, proxy: proxy.cut(), 5),
    "connections forgotten by a firewall": (lambda _, proxy: proxy.forget(), 1),
    "connections refused for two seconds": (refuse, 2),
    "the reply to a COMMIT lost": (lambda _, proxy: proxy.lose_reply_to(b"COMMIT"), 5),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_study_outlasts_what_befalls_its_server(
    cluster: postgres.Cluster, place: Place, name: str
) -> None:
    trouble, times = TROUBLES[name]
    with Proxy(cluster.port) as proxy:
        through = Place(place.directory, server=proxy.through(place.url))
        with a_driver(through) as process:
            for time_ in range(times):
                wait_until(lambda n=time_: len(place.said("ran")) > n, process)
                trouble(cluster, proxy)
            status = process.wait(timeout=PATIENCE_SECONDS)
    assert status == 0, said(place)
    assert finish(place) == []


def test_without_a_connection_left_a_driver_ends_and_goes_on_later(
    cluster: postgres.Cluster, place: Place
) -> None:
    # The one role is a superuser, who has no limit: the database has one for everybody else.
    name = place.url.rpartition("/")[2]
    cluster.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    cluster.execute(f"GRANT ALL ON DATABASE {name} TO guest")
    cluster.execute(f"ALTER DATABASE {name} OWNER TO guest")
    cluster.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 1")
    guest = f"postgresql://guest:guest@127.0.0.1:{cluster.port}/{name}"
    limited = Place(place.directory, server=guest)
    with a_driver(limited) as process:
        status = process.wait(timeout=PATIENCE_SECONDS)
    assert status == 3, said(place)
    assert "too many connections" in said(place)
    cluster.execute(f"ALTER DATABASE {name} CONNECTION LIMIT -1")
    assert finish(limited) == []


DRIVERS, TRIALS = 50, 20


@pytest.mark.timeout(1800)
def test_fifty_drivers_at_one_server_lose_and_double_nothing(
    cluster: postgres.Cluster, tmp_path: Path
) -> None:
    url = cluster.new_database()
    names = [f"study-{n}" for n in range(DRIVERS)]
    team = [driver.start(url, tmp_path, study=name, trials=TRIALS) for name in names]
    for one, name in zip(team, names, strict=True):
        said, code = one.end()
        assert code == 0, (name, said)
        study = read_study(name, url=url, home=tmp_path)
        assert [record.number for record in study.records] == list(range(TRIALS))
        told = {(r.number, r.measurement.tokens_per_second) for r in study.records if r.measurement}
        heard = (line.split()[1:] for line in said if line.startswith("told"))
        assert told == {(int(number), float(speed)) for number, speed in heard}
        kept = Spool(tmp_path / name / "spool.jsonl", study.identity).read().records
        assert kept == study.records
        assert (study.running, study.warnings, study.holder) == ((), (), None)
