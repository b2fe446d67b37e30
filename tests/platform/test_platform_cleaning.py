"""What a platform keeps on its disk, and what it removes."""

from __future__ import annotations

from pathlib import Path

from osmosis_ai.testing import ScriptedEndpoint, by_turn, text
from platforms import Platform, make_workspace, rows, serving, submission


def replace(platform: Platform, data: bytes) -> None:
    known = platform.ask("GET", "/api/cli/datasets/sums").body["id"]
    about = {"file_name": "sums", "file_size": len(data), "extension": "jsonl", "overwrite_dataset_id": known}
    created = platform.ask("POST", "/api/cli/datasets", about).body
    assert platform.ask("PUT", created["upload"]["presigned_url"], data).status == 200
    assert platform.ask("POST", f"/api/cli/datasets/{created['id']}/complete", {}).status == 200


def stored(platform: Platform) -> list[bytes]:
    return sorted(path.read_bytes() for path in platform.home.datasets.iterdir())


def test_an_ended_run_s_code_is_removed_and_a_retry_has_code_and_dataset_again(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    here = {"X-Osmosis-Path": str(workspace)}
    main = workspace / "rollouts/plain/main.py"
    # It refuses the run's key, so that the run fails at its preflight.
    refusing = ScriptedEndpoint(by_turn(text("1")), api_key="sesame")
    with serving(tmp_path / "platform") as platform, refusing.run_in_thread() as endpoint:
        assert platform.upload("sums", rows(4)).status == 200
        platform.ask("GET", "/api/cli/eval-runs", headers=here)
        failing = submission(model_path="scripted") | {"advanced_config": {"base_url": endpoint.url}}
        name = platform.ask("POST", "/api/cli/eval-runs", failing).body["name"]
        run = platform.wait(name)
        folder = platform.home.run(run["eval_run"]["id"])
    with serving(tmp_path / "platform") as platform:
        assert not (folder / "code").exists()
        replace(platform, rows(5))
        assert stored(platform) == [rows(5)]
        assert (folder / "dataset/sums.jsonl").read_bytes() == rows(4)
        main.unlink()
        assert platform.ask("POST", f"/api/cli/eval-runs/{name}/retry", {}).status == 200
        again = platform.wait(name)
        # From the clone, at the commit of the first time.
        assert again["commit_sha"] == run["commit_sha"]
        assert [line for line in platform.log(name) if "the clone of an earlier run" in line]


def test_a_file_is_kept_as_long_as_a_dataset_has_its_content(tmp_path: Path) -> None:
    with serving(tmp_path / "platform") as platform:
        for name in ("sums", "same"):
            assert platform.upload(name, rows(4)).status == 200
        assert stored(platform) == [rows(4)]
        assert platform.ask("DELETE", "/api/cli/datasets/sums").status == 200
        assert stored(platform) == [rows(4)]
        assert platform.ask("DELETE", "/api/cli/datasets/same").status == 200
        assert stored(platform) == []


def test_uploads_that_were_given_up_are_removed_at_the_next_start(tmp_path: Path) -> None:
    with serving(tmp_path / "platform") as platform:
        data = rows(4)
        about = {"file_name": "late", "file_size": len(data), "extension": "jsonl"}
        recent, old = (platform.ask("POST", "/api/cli/datasets", about).body for _ in range(2))
        for each in (recent, old):
            assert platform.ask("PUT", each["upload"]["presigned_url"], data).status == 200
        with platform.database.write("making an upload old") as db:
            db.execute("UPDATE datasets SET updated_at = updated_at - 8 * 86400 WHERE id = ?", (old["id"],))
    with serving(tmp_path / "platform") as platform:
        assert [path.stem for path in platform.home.datasets.iterdir()] == [recent["id"]]
        done = platform.ask("POST", f"/api/cli/datasets/{recent['id']}/complete", {})
        assert (done.status, done.body["row_count"]) == (200, 4)
