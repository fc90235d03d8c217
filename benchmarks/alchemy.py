"""sqlalchemy-dlock, as its README uses it: a connection of an engine's pool for each block."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import threading
from collections.abc import Iterator
from typing import Any

import psycopg

from tests.support import parameters

from .peers import DLOCK, REST, Function, Peer


class DLock:
    """Its locks, on an engine for each alias."""

    def __init__(self) -> None:
        self.engines: dict[str, Any] = {}
        self.current = threading.local()
        self.mutex = threading.Lock()
        self.alchemy: Any = importlib.import_module("sqlalchemy")
        self.create: Any = importlib.import_module("sqlalchemy_dlock").create_sadlock

    def engine(self, alias: str) -> Any:
        with self.mutex:
            if alias not in self.engines:
                options: dict[str, Any] = {"pool_size": 3 if alias == "pooled" else 20, "max_overflow": 0}
                self.engines[alias] = self.alchemy.create_engine(
                    "postgresql+psycopg://",
                    creator=lambda: psycopg.connect(**parameters(alias), prepare_threshold=None),
                    **options,
                )
            return self.engines[alias]

    def close(self) -> None:
        while self.engines:
            self.engines.popitem()[1].dispose()

    @contextlib.contextmanager
    def connection(self, alias: str, begin: bool = False) -> Iterator[Any]:
        with self.engine(alias).connect() as connection:
            self.current.connection, self.current.begun = connection, begin
            with connection.begin() if begin else contextlib.nullcontext():
                yield connection

    @contextlib.contextmanager
    def block(self, key: Any, alias: str, *, begin: bool = False, **options: Any) -> Iterator[bool]:
        with self.connection(alias, begin) as connection, self.create(connection, key, **options):
            yield True

    @contextlib.contextmanager
    def timed(self, key: Any, alias: str, seconds: float) -> Iterator[bool]:
        with self.connection(alias) as connection:
            lock = self.create(connection, key)
            acquired = lock.acquire(timeout=seconds, interval=0.1)  # the shortest that it accepts
            try:
                yield acquired
            finally:
                if acquired:
                    lock.release()

    @contextlib.contextmanager
    def attempt(self, key: Any, alias: str, *, begin: bool = False) -> Iterator[bool]:
        with self.connection(alias, begin) as connection:
            lock = self.create(connection, key)
            acquired = lock.acquire(block=False)
            try:
                yield acquired
            finally:
                if acquired:
                    lock.release()
            if begin and acquired:
                connection.exec_driver_sql(REST)

    def decorate(self, key: Any, alias: str, function: Function) -> Function:
        def locked() -> Any:
            with self.attempt(key, alias) as acquired:
                return function() if acquired else None

        return locked

    def execute(self, alias: str, statement: str, params: Any = ()) -> Any:
        """Run a statement and commit it, as Django's autocommit does, unless a transaction was begun on purpose."""
        connection = self.current.connection
        answer = connection.exec_driver_sql(statement, tuple(params))
        row = answer.first() if answer.returns_rows else None
        if not self.current.begun:
            connection.commit()
        return row[0] if row else None


def dlock() -> Peer:
    library = DLock()
    return Peer(
        DLOCK,
        importlib.metadata.version("sqlalchemy-dlock"),
        lock=library.block,
        timed=library.timed,
        attempt=library.attempt,
        decorate=library.decorate,
        in_atomic=lambda key, alias: library.block(key, alias, begin=True),
        transaction=lambda key, alias: library.block(key, alias, begin=True, xact=True),
        attempt_in_atomic=lambda key, alias: library.attempt(key, alias, begin=True),
        aattempt=AsyncDLock().attempt,
        execute=library.execute,
        close=library.close,
        uses_django=False,
    )


class AsyncDLock:
    """Its asynchronous side: each task has a connection of its own."""

    def __init__(self) -> None:
        self.engine: Any = None

    @contextlib.asynccontextmanager
    async def attempt(self, key: Any) -> Any:
        create = importlib.import_module("sqlalchemy_dlock").create_async_sadlock
        async with self._engine().connect() as connection:
            lock = create(connection, key)
            acquired = await lock.acquire(block=False)
            try:
                yield acquired
            finally:
                if acquired:
                    await lock.release()

    def _engine(self) -> Any:
        if self.engine is None:
            asynchronous: Any = importlib.import_module("sqlalchemy.ext.asyncio")
            pool: Any = importlib.import_module("sqlalchemy.pool")

            async def connect() -> Any:
                return await psycopg.AsyncConnection.connect(**parameters())

            # The sessions end with their blocks, and so with the event loop.
            self.engine = asynchronous.create_async_engine(
                "postgresql+psycopg_async://", async_creator=connect, poolclass=pool.NullPool
            )
        return self.engine
