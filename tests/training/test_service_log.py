"""The service's log among the progress: a night in which it can't be read for a while."""

import asyncio
from types import SimpleNamespace

from cortex_training.errors import ServiceError, TransportError
from cortex_training.training.last_words import service_log

BUSY = ServiceError(status=503, message="no answer")


class Driver:
    """A driver whose job's log is read from a script: pages, and errors that are raised instead of one."""

    def __init__(self, *script, owned=True, runs=True):
        self.state = SimpleNamespace(
            current=SimpleNamespace(job_id="j", owned=owned), has_run=lambda job_id: runs and job_id == "j"
        )
        self.client = self
        self.lines = []
        self.cursors = []
        self._script = list(script)

    def tell(self, stage, message):
        assert stage == "log"
        self.lines.append(message)

    async def tail_logs(self, job_id, *, sub_job_id, cursor=None):
        assert sub_job_id == f"{job_id}:training:0"
        self.cursors.append(cursor)
        answer = self._script.pop(0) if self._script else page(next_cursor=cursor)
        if isinstance(answer, Exception):
            raise answer
        return answer


def page(*lines, next_cursor):
    return {"entries": [{"msg": line} for line in lines], "next_cursor": next_cursor}


def followed(driver, monkeypatch, looks):
    """Follow the log for so many sleeps, none of which takes time; returns how long they were."""
    slept = []
    sleep = asyncio.sleep

    async def note(seconds):
        slept.append(seconds)
        await sleep(0)

    async def main():
        async with service_log(driver):
            while len(slept) < looks:
                await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    asyncio.run(main())
    return slept[:looks]


def test_a_log_that_could_not_be_read_goes_on_where_it_stopped(monkeypatch):
    driver = Driver(
        page("one", next_cursor="1"),
        BUSY,
        TransportError("reset"),
        page("two", "three", next_cursor="3"),
        page("three", next_cursor="3"),
        page("four", next_cursor="4"),
    )
    followed(driver, monkeypatch, 8)
    assert driver.lines == ["one", "two", "three", "four"]
    assert driver.cursors[:7] == [None, "1", "1", "1", "3", "3", "4"]


def test_one_that_stays_silent_is_asked_less_and_less_and_soon_again_once_it_speaks(monkeypatch):
    slept = followed(Driver(*[BUSY] * 20, page("back", next_cursor="1")), monkeypatch, 21)
    assert slept[:20] == sorted(slept[:20])
    assert slept[19] == 10.0
    assert slept[20] < 1.0


def test_a_page_without_a_cursor_is_told_once(monkeypatch):
    driver = Driver(*[{"entries": [{"msg": "one"}]}] * 9)
    followed(driver, monkeypatch, 5)
    assert driver.lines == ["one"]


def test_another_job_is_read_from_its_beginning(monkeypatch):
    driver = Driver(page("one", next_cursor="1"), BUSY)
    tail = driver.tail_logs

    async def replaced(job_id, **options):
        answer = await tail(job_id, **options)
        driver.state.current = SimpleNamespace(job_id="k", owned=False)
        return answer

    driver.tail_logs = replaced
    followed(driver, monkeypatch, 3)
    assert driver.cursors[:2] == [None, None]


def test_a_job_of_somebody_else_is_followed_and_one_that_has_not_run_is_not_asked(monkeypatch):
    driver = Driver(page("one", next_cursor="1"), owned=False, runs=False)
    followed(driver, monkeypatch, 2)
    assert driver.lines == ["one"]
    waiting = Driver(runs=False)
    followed(waiting, monkeypatch, 3)
    assert waiting.cursors == []
