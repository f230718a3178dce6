"""Any node answers for all vhosts over HTTP: lists are gathered, and ids are found wherever they lie."""

from pathlib import Path

import pytest

from headrace.controller.changes import PutPermission, create_vhost
from headrace.controller.entities import Permission
from headrace.core_log.peer.link import PeerLink
from headrace.gateways.relay.leaders import NoLeader
from tests.whole_cluster import WholeCluster, WholeNode, until, whole_cluster


async def divided(three: WholeCluster) -> WholeNode:
    """Vhosts `/` and `shop` have leaders of their own, and topics each. A node that does not lead `/`."""
    await three.start(1, 2, 3)
    metadata = three.nodes[1].agent.metadata
    permission = PutPermission(Permission("guest", "shop", ".*", ".*", ".*"))
    await metadata.commit(*create_vhost("shop", metadata.new_stream), permission)
    await until(lambda: all(any(one.shards.here(vhost) for one in three.up()) for vhost in ("/", "shop")))
    for vhost, names in (("/", "bc"), ("shop", "ad")):
        for name in names:
            answer = await three.nodes[1].ask("POST", "/api/v1/topics", {"name": name, "vhost": vhost})
            assert answer[0] == 201, answer
    return three.other()


async def names(node: WholeNode, query: str = "") -> tuple[list[str], bool]:
    status, answer = await node.ask("GET", f"/api/v1/topics?kind=topic{query}")
    assert status == 200, answer
    return [one["topic"] for one in answer["topics"]], answer["more"]


async def test_lists_are_gathered_and_ids_are_found_through_any_node(tmp_path: Path) -> None:
    async with whole_cluster(tmp_path) as three:
        any_node = await divided(three)
        assert await names(any_node) == (["b", "c", "shop|a", "shop|d"], False)
        assert await names(any_node, "&limit=3") == (["b", "c", "shop|a"], True)
        assert await names(any_node, "&limit=3&after=shop|a") == (["shop|d"], False)
        assert await names(any_node, "&vhost=shop") == (["shop|a", "shop|d"], False)
        assert (await any_node.ask("GET", "/api/v1/topics?limit=x"))[0] == 400
        assert (await any_node.ask("GET", "/api/v1/topics", user="guest:wrong"))[0] == 401

        # Cursors.
        for cursor, topic in (("here", "b"), ("there", "shop|a")):
            body = {"topics": {topic: {"offsets": {"0": 0}}}}
            assert (await any_node.ask("PUT", f"/api/v1/cursors/{cursor}", body))[0] == 201
            assert (await any_node.ask("PUT", f"/api/v1/cursors/{cursor}", body))[0] == 200
            assert (await any_node.ask("GET", f"/api/v1/cursors/{cursor}"))[1]["cursor"] == cursor
        _status, answer = await any_node.ask("GET", "/api/v1/cursors")
        assert [one["cursor"] for one in answer["cursors"]] == ["here", "there"]
        assert (await any_node.ask("DELETE", "/api/v1/cursors/there"))[0] == 204
        assert (await any_node.ask("GET", "/api/v1/cursors/there"))[0] == 404

        # Stages and commits of what is led elsewhere.
        for topic in ("b", "shop|a"):
            body = {"query": f"into {topic}", "batch": 0, "messages": [{"value": "one"}]}
            staged = await any_node.ask("POST", f"/api/v1/topics/{topic.replace('|', '%7C')}/stages", body)
            assert staged[0] == 201, staged
            assert (await any_node.ask("GET", "/api/v1/stages"))[1]["total"] == 1
            commit = {"query": f"into {topic}", "batch": 0, "stages": [staged[1]["id"]]}
            for repeated in (False, True):
                done = await any_node.ask("POST", "/api/v1/stages/commit", commit)
                assert done[0] == 200 and done[1]["repeated"] is repeated, done
            where = f"/api/v1/stages/queries/into%20{topic.replace('|', '%7C')}"
            assert (await any_node.ask("GET", where))[1]["last_batch"] == 0
            assert (await any_node.ask("DELETE", where))[0] == 204
        assert (await any_node.ask("POST", "/api/v1/stages/abort", {"stages": []}))[1] == {"aborted": 0}

        # The audit of both, page by page: each event once.
        seen: list[str] = []
        after = ""
        while True:
            _status, page = await any_node.ask("GET", f"/api/v1/audit?limit=1{after}")
            seen += [one["about"]["query"] for one in page["events"]]
            if page["cursor"] is None:
                break
            after = f"&after={page['cursor']}"
        assert seen == ["into shop|a", "into b"]

        # What is delayed.
        assert (await any_node.ask("GET", "/api/v1/delayed"))[1]["pending"] == 0
        assert (await any_node.ask("GET", "/api/v1/delayed/messages/nothing"))[0] in (400, 404)
        assert (await any_node.ask("GET", "/api/v1/redrives"))[1] == {"redrives": [], "earlier": []}


async def test_a_list_without_a_part_that_nobody_leads_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with whole_cluster(tmp_path) as three:
        await divided(three)
        one = three.other("shop")
        there = one.shards.connect

        async def connect(vhost: str, detail: bytes) -> PeerLink:
            if vhost == "shop":
                raise NoLeader("nobody leads vhost 'shop'")
            return await there(vhost, detail)

        monkeypatch.setattr(one.shards, "connect", connect)
        _status, answer = await one.ask("GET", "/api/v1/topics?kind=topic")
        assert [one["topic"] for one in answer["topics"]] == ["b", "c"]
        assert answer["missing_vhosts"] == ["shop"]
        # Whether it is there that part would have to say.
        assert (await one.ask("GET", "/api/v1/cursors/some"))[0] == 503
        assert (await one.ask("POST", "/api/v1/stages/commit", {"query": "q", "batch": 0, "stages": []}))[0] == 503
