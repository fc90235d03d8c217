"""What is shipped, what an import brings along, and that each storey imports only what is below it."""

from __future__ import annotations

import ast
import configparser
import email
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import django_advisory_lock
from tests.support import OtherSession, output, spawn

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "django_advisory_lock"
SECONDS = 110

# The upper floors of the house. All else is the ground floor, and "" is the facade, which stands on top.
UPPER_FLOORS = (
    {"guards", "models"},
    {"admin", "apps", "checks", "doctor", "management", "pytest_plugin", "testing"},
    {""},
)


def run(*command: str | Path, cwd: Path) -> str:
    """Run Python outside the checkout, as somebody does who has just installed the package."""
    hidden = ("DJANGO_SETTINGS_MODULE", "PYTHONPATH", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: a build leaves files in the tree that it reads."""
    target = tmp_path_factory.mktemp("packaging") / "source"
    ignored = shutil.ignore_patterns(".?*", "__pycache__", "build", "dist", "htmlcov", "*.egg-info")
    shutil.copytree(PROJECT, target, ignore=ignored)
    shutil.copytree(PROJECT / ".ci", target / ".ci", ignore=shutil.ignore_patterns("work", "__pycache__"))
    left = target / ".ci" / "work" / "log"  # as a run of .ci/run leaves it while it goes on
    left.mkdir(parents=True)
    (left / "matrix").write_text("passed")
    return target


@pytest.fixture(scope="module")
def dist(source: Path) -> Path:
    """The directory with the sdist, and the wheel that was built from the unpacked sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source.parent / "dist", cwd=source)
    return source.parent / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


def shipped() -> set[str]:
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(PROJECT)) for path in files}


# -- What is shipped --------------------------------------------------------------------------------------------------


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == shipped()
    assert "django_advisory_lock/py.typed" in names
    assert {f"django_advisory_lock/migrations/{name}.py" for name in ("__init__", "0001_initial")} <= names


def test_the_wheel_has_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        assert archive.read(name) == (PROJECT / "LICENSE").read_bytes()


def test_the_wheel_is_for_every_platform(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_sdist_has_what_it_takes_to_change_the_package(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped() <= names
    assert {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.cfg"} <= names
    assert {"tests/settings.py", "tests/test_packaging.py", "testproject/embedded_postgres.py"} <= names
    assert {name for name in names if name.startswith(".")} == {".ci", ".ci/matrix.py", ".ci/run"}
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_a_clean_environment_can_use_it(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", environment)
    run(*pip, "install", "--quiet", wheel, "psycopg[binary]", cwd=tmp_path)
    assert "No broken requirements" in run(*pip, "check", cwd=tmp_path)
    code = "from django_advisory_lock import *; print(crc32_key('account-sync-42').args)"
    assert run(environment / "bin" / "python", "-W", "error", "-c", code, cwd=tmp_path) == "(124136801,)\n"


def test_metadata(metadata: Message) -> None:
    config = configparser.ConfigParser()
    config.read(PROJECT / "setup.cfg")
    assert metadata["Name"] == "django-advisory-lock"
    assert metadata["Version"] == config["metadata"]["version"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert "MIT" in (metadata["License-Expression"], metadata["License"])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (PROJECT / "README.md").read_text().strip()
    assert metadata.get_all("Provides-Extra") == ["test", "bench", "docs", "dev"]
    classifiers = metadata.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert "Framework :: Django" in classifiers
    assert {"Operating System :: MacOS", "Operating System :: POSIX"} <= set(classifiers)  # it needs fork()


def test_nothing_is_required_but_django_and_psycopg_and_nothing_is_capped(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    assert [line for line in requirements if "extra ==" not in line] == ["Django>=5.2", "psycopg>=3.1.12"]
    assert not [
        line for line in requirements if any(sign in line.partition(";")[0] for sign in ("<", "~=", "!=", ",<"))
    ]


# -- The facade -------------------------------------------------------------------------------------------------------


def test_import_without_settings_and_without_models(tmp_path: Path) -> None:
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(PROJECT)!r})
        import django_advisory_lock
        from django.apps import apps
        from django.conf import settings
        assert not settings.configured
        assert not any(apps.all_models.values()), apps.all_models
        late = ("admin", "apps", "checks", "guards.admin", "models", "pytest_plugin", "testing")
        assert not [name for name in late if "django_advisory_lock." + name in sys.modules]
        assert not [name for name in sys.modules if name.startswith("django.contrib.") or name == "pytest"]
    """
    assert run(sys.executable, "-W", "error", "-c", code, cwd=tmp_path) == ""


@pytest.mark.parametrize("is_installed", [False, True])
def test_what_needs_the_app(is_installed: bool, tmp_path: Path, name: str, other: OtherSession) -> None:
    """Locks and guards do not; only what notes its starts does, and says so. Without the app there is no model."""
    apps = ["django_advisory_lock"] if is_installed else []
    (tmp_path / "few_settings.py").write_text(f"from tests.settings import *\nINSTALLED_APPS = {apps}\n")
    code = f"""if True:
        from django.apps import apps
        from django.core.exceptions import ImproperlyConfigured
        from django.core.management import BaseCommand, call_command
        from django_advisory_lock import *

        class Command(AdvisoryLockCommandMixin, BaseCommand):
            lock_key = {name!r}

            def handle(self, *args, **options):
                return "ran"

        class Job(AdvisoryLockJobMixin):
            lock_key = {name!r}
            lock_min_interval = 60

            def run(self):
                return "ran"

        call_command(Command())
        print([model.__name__ for model in apps.get_models()])
        for periodic in (Job().run, periodic_lock({name!r}, min_interval=60)(lambda: "ran")):
            try:
                print(periodic())
            except ImproperlyConfigured as error:
                print(error)
    """
    paths = os.pathsep.join(map(str, (tmp_path, PROJECT)))
    process = spawn(code, PYTHONPATH=paths, DJANGO_SETTINGS_MODULE="few_settings")
    try:
        lines = output(process).splitlines()
    finally:
        other.raw.execute("DELETE FROM django_advisory_lock_periodicrun")
    assert lines[:2] == ["ran", str(["PeriodicRun", "HeldLock"] if is_installed else [])]
    assert lines[2:] == ["ran", "ran"] if is_installed else "add 'django_advisory_lock' to INSTALLED_APPS" in lines[2]


def test_every_public_name_is_there() -> None:
    names = django_advisory_lock.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert all(hasattr(django_advisory_lock, name) for name in names)


def test_every_name_that_the_facade_imports_is_public() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imported = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported - {"annotations"} == set(django_advisory_lock.__all__)


# -- The storeys ------------------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """Return the name of a module below the package, of which the facade has none."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def floor(module: str) -> int:
    """Return how far up a module stands: with the package that it is in."""
    top = module.partition(".")[0]
    return next((number for number, names in enumerate(UPPER_FLOORS, 1) if top in names), 0)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without what is there for annotations alone, which may look up."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from executed(child)


def imports(module: str) -> Iterator[str]:
    """Yield what a module imports, also inside its functions, by absolute name."""
    package = f"{PACKAGE.name}.{module}"
    if MODULES[module].name != "__init__.py":
        package = package.rpartition(".")[0]
    for node in executed(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package.rstrip("."))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def own_module(name: str) -> str | None:
    """Return the module of this package that an imported name is, or is in."""
    while name.startswith(f"{PACKAGE.name}."):
        below = name.partition(".")[2]
        if below in MODULES:
            return below
        name = name.rpartition(".")[0]
    return "" if name == PACKAGE.name else None


def imported_modules(module: str) -> set[str]:
    return {found for name in imports(module) if (found := own_module(name)) is not None} - {module}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_from_a_floor_above(module: str) -> None:
    assert [found for found in imported_modules(module) if floor(found) > floor(module)] == []


def test_each_module_has_a_place_above_all_that_it_imports() -> None:
    graph = {module: imported_modules(module) for module in MODULES}
    order = list(TopologicalSorter(graph).static_order())  # CycleError names those that import one another
    assert order.index("exceptions") < order.index("keys") < order.index("locks") < order.index("guards.command")
    assert order.index("guards.period") < order.index("guards.base") < order.index("guards.periodic")
    assert order.index("models") < min(order.index("admin"), order.index("checks"))


def test_floors() -> None:
    modules = (
        "keys",
        "guards.command",
        "guards.period",
        "models",
        "admin.held_locks",
        "management.commands.advisory_lock",
        "",
    )
    assert [floor(module) for module in modules] == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("imported", "module"),
    [
        ("django_advisory_lock", ""),
        ("django_advisory_lock.advisory_lock", ""),
        ("django_advisory_lock.keys", "keys"),
        ("django_advisory_lock.keys.lock_key", "keys"),
        ("django_advisory_lock.guards.command.AdvisoryLockCommandMixin", "guards.command"),
        ("django.db.models", None),
    ],
)
def test_imports_are_recognised(imported: str, module: str | None) -> None:
    assert own_module(imported) == module


def test_imports_are_found() -> None:
    assert {"django_advisory_lock.locks.advisory_lock", "django_advisory_lock.keys.lock_key"} <= set(imports(""))
    assert "django_advisory_lock.notices.logger" in set(imports("guards.command"))
