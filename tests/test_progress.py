from spes_mega import progress
from spes_mega.progress import byte_progress


def test_quick_work_says_nothing_and_long_work_a_line_for_each_tenth(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with byte_progress("copy", 1000) as advance:
        advance(450)
        assert capsys.readouterr().err == ""
        now[0] += progress.QUIET_S
        advance(60)
        advance(30)
        advance(70)
    assert capsys.readouterr().err == "copy: 50 % of 1,000 bytes\ncopy: 60 % of 1,000 bytes\n"
