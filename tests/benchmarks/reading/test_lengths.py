"""What is long, and what is left out."""

from pathlib import Path

from benchmarks.reading.lengths import Length, lengths_of


def package(folder: Path, **files: str) -> Path:
    for name, source in files.items():
        file = folder / f"{name.replace('_in_', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return folder


def function(name: str, num_lines: int, docstring: str = "") -> str:
    body = ["    x = 1"] * (num_lines - 1 - len(docstring.splitlines()))
    return "\n".join([f"def {name}():", *([docstring] if docstring else []), *body]) + "\n"


def test_functions_of_more_than_60_lines_and_files_of_more_than_450_are_long(tmp_path: Path) -> None:
    source = function("longest", 60) + function("too_long", 61)
    lengths = lengths_of(package(tmp_path, short=source, long="x = 1\n" * 451, longest="x = 1\n" * 450))
    assert lengths.long_functions == (Length("short.py: too_long", 61, 60),)
    assert lengths.long_files == (Length("long.py", 451, 451),)
    assert lengths.mean_function == 60.5


def test_what_lies_behind_the_docstring_is_told(tmp_path: Path) -> None:
    (told,) = lengths_of(package(tmp_path, one=function("f", 70, '    """One.\n\n    Two."""'))).long_functions
    assert (told.num_lines, told.num_behind) == (70, 66)
    assert str(told) == "one.py: f: 70 (66 behind the docstring)"


def test_kernels_of_the_device_are_left_out(tmp_path: Path) -> None:
    for wing in (tmp_path, tmp_path / "memory"):
        assert package(wing / "device" / "kernels", k=function("kernel", 100)).is_dir()
    package(tmp_path, other=function("f", 10))
    assert lengths_of(tmp_path).long_functions == ()
    assert lengths_of(tmp_path).mean_function == 10
