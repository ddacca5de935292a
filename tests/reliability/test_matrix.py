"""The tables of docs/reliability.md are those of the markers, and nearly every fault has a test."""

from __future__ import annotations

from tests.reliability import matrix


def test_tables_are_up_to_date():
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(), "run make configs"


def test_faults_and_promises_have_tests():
    tests = matrix.tests_by_marker("fault")
    assert set(tests) <= set(matrix.FAULTS)
    assert set(matrix.tests_by_marker("promise")) <= set(matrix.PROMISES)
    assert all(fault.lacks for number, fault in matrix.FAULTS.items() if number not in tests)
    assert {matrix.FAULTS[number].promise for number in tests} | set(matrix.tests_by_marker("promise")) == set(
        matrix.PROMISES
    )


def test_markers_in_parameters_are_found(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    source = """
@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.fault(3))])
def test_a(x): ...
@pytest.mark.promise(4)
def test_b(): ...
"""
    (tmp_path / "tests" / "test_x.py").write_text(source)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    assert matrix.tests_by_marker("fault") == {n: ["tests/test_x.py::test_a"] for n in (1, 2, 3)}
    assert matrix.tests_by_marker("promise") == {4: ["tests/test_x.py::test_b"]}
