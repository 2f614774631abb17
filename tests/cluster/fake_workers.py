"""Workers made of scripts, for what real ones do not do on demand: refuse, fall silent, contradict, send nonsense. They speak
the worker protocol to a real router; no model computes, tokens count up from 65, and a request that went on elsewhere goes on
counting."""
import queue
import random
import threading
import time
from concurrent import futures

import grpc

from conftest import fleet_grpc, fleet_pb2, worker_grpc, worker_pb2

FIRST, LENGTH = 65, 2


def token(i):
    """Number i of an answer."""
    return FIRST + i % 20


def n_generated(request):
    return len(request.token_ids) - request.n_prompt


LAYOUT = dict(page_tokens=64, n_sliding_layers=3, n_full_layers=3, n_kv_heads=8, head_dim=64, window_tokens=128,
              kv_dtype_sliding="bf16", kv_dtype_full="bf16", model_fingerprint="fake", weight_form="mxfp4", layout_version=1)


class FakeWorker:
    """Joins a router and stays in its fleet until stop(). log holds what happened as tuples, name first."""
    role = None

    def __init__(self, fleet, name, port=0, layout=None, context=4096):
        self.fleet, self.name = fleet, name
        self.incarnation = random.getrandbits(63) | 1
        self.layout, self.context = {**LAYOUT, **(layout or {})}, context
        self.log, self.ended = [], threading.Event()
        self.beats, self.load = True, fleet_pb2.Load(free_sliding_pages=100, free_full_pages=100)
        self.server = grpc.server(futures.ThreadPoolExecutor(64))
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.serve()
        self.server.start()
        threading.Thread(target=self.join, daemon=True).start()

    def identity(self):
        descriptor = worker_pb2.PeerDescriptor(incarnation=self.incarnation, name=self.name,
                                               layout=worker_pb2.KvLayout(**self.layout))
        return fleet_pb2.Identity(role=self.role, name=self.name, rpc_address=f"127.0.0.1:{self.port}", model=self.fleet.model,
                                  max_context_tokens=self.context, vocab_size=2048, eos_ids=[2020], descriptor=descriptor, step_timeout_ms=300)

    def join(self):
        def updates():
            yield fleet_pb2.JoinUpdate(identity=self.identity())
            while not self.ended.wait(0.05):
                if self.beats:
                    yield fleet_pb2.JoinUpdate(load=self.load)

        try:
            with grpc.insecure_channel(self.fleet.router.rpc) as channel:
                for _ in fleet_grpc.FleetStub(channel).Join(updates()):
                    self.log.append(("joined",))
            self.log.append(("left",))
        except grpc.RpcError as error:
            self.log.append(("join refused", error.code(), error.details()))

    def has(self, *entry):
        return entry in self.log

    def count(self, name):
        return sum(entry[0] == name for entry in self.log)

    def stop(self):
        """As if it were killed: every stream breaks."""
        self.ended.set()
        self.server.stop(0).wait()


class FakePrefill(FakeWorker, worker_grpc.PrefillServicer):
    role = fleet_pb2.ROLE_PREFILL

    def __init__(self, *args, **settings):
        self.known = set()
        self.fail = None          # (grpc code, status name): every run fails
        self.delay = 0.0          # seconds of computing
        self.first_comes_late = False   # the decode worker's tokens overtake ours
        super().__init__(*args, **settings)

    def serve(self):
        worker_grpc.add_PrefillServicer_to_server(self, self.server)

    def refuse(self, context, code, name, text):
        context.set_trailing_metadata((("tandem-status", name),))
        context.abort(code, text)

    def Run(self, run, context):
        self.log.append(("run", run.request.request_id, run.HasField("descriptor")))
        if run.HasField("descriptor"):
            self.known.add(run.descriptor.incarnation)
        if run.target.incarnation not in self.known:
            self.refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_PEER", "never heard of it")
        if self.fail:
            self.refuse(context, *self.fail, "told to fail")
        time.sleep(self.delay)
        decode = next(d for d in self.fleet.decode if d.incarnation == run.target.incarnation)
        at = n_generated(run.request)
        is_last = run.request.max_tokens == at + 1
        if self.first_comes_late:
            decode.complete(run.target.generation)
            time.sleep(0.2)
        yield worker_pb2.RunEvent(first=worker_pb2.FirstToken(token_id=token(at), finish_reason=LENGTH if is_last else 0))
        if not is_last and not self.first_comes_late:
            decode.complete(run.target.generation)
        yield worker_pb2.RunEvent(done=worker_pb2.RunDone(kv_bytes=0 if is_last else 4096, handoff_us=7, transport="fake"))


class FakeDecode(FakeWorker, worker_grpc.DecodeServicer):
    role = fleet_pb2.ROLE_DECODE

    def __init__(self, *args, **settings):
        self.refuse_with = None   # status name: every start is refused
        self.step_seconds, self.tokens_per_step = 0.002, 1
        self.requests, self.out = {}, queue.Queue()
        super().__init__(*args, **settings)

    def serve(self):
        worker_grpc.add_DecodeServicer_to_server(self, self.server)

    def complete(self, stream_id):
        if stream_id in self.requests:
            self.requests[stream_id]["runs"] = True

    def say(self, **events):
        """Sends this on the router's stream, sense or not."""
        self.out.put(worker_pb2.DecodeEvents(**events))

    def finished(self, stream_id, **fields):
        self.say(finished=[worker_pb2.DecodeFinished(stream_id=stream_id, **fields)])

    def start(self, start):
        self.log.append(("start", start.request.request_id))
        if self.refuse_with:
            self.finished(start.stream_id, status_name=self.refuse_with, message="told to refuse")
            return
        is_local = start.prefill == 0
        if is_local:
            self.log.append(("local", start.request.request_id))
        self.requests[start.stream_id] = {"request": start.request, "runs": is_local,
                                          "n": n_generated(start.request) + (not is_local)}
        if is_local:
            return
        target = worker_pb2.KvTarget(incarnation=self.incarnation, generation=start.stream_id,
                                     full=worker_pb2.PageList(pages=[1, 2]))
        self.say(reserved=[worker_pb2.DecodeReserved(stream_id=start.stream_id, target=target)])

    def read(self, commands):
        try:
            for command in commands:
                kind = command.WhichOneof("command")
                if kind == "start":
                    self.start(command.start)
                elif kind == "peer":
                    self.log.append(("peer", command.peer.name))
                elif kind in ("cancel", "first"):
                    self.log.append((kind,))
                    self.requests.pop(getattr(command, kind).stream_id, None)
                else:
                    self.log.append((kind,))
        except Exception:   # the router went away; grpc tells it in several ways
            pass
        self.requests.clear()
        self.out.put(None)

    def step(self):
        while not self.ended.wait(self.step_seconds):
            events = worker_pb2.DecodeEvents()
            for stream_id, r in list(self.requests.items()):
                if not r["runs"]:
                    continue
                for _ in range(min(self.tokens_per_step, r["request"].max_tokens - r["n"])):
                    events.stream_ids.append(stream_id)
                    events.token_ids.append(token(r["n"]))
                    r["n"] += 1
                if r["n"] >= r["request"].max_tokens:
                    events.finished.append(worker_pb2.DecodeFinished(stream_id=stream_id, reason=LENGTH, decode_us=9,
                                                                     handoff_bytes=4096, transport="fake"))
                    self.requests.pop(stream_id, None)
            if events.stream_ids or events.finished:
                self.out.put(events)

    def Generate(self, commands, context):
        self.out = queue.Queue()
        threading.Thread(target=self.read, args=(commands,), daemon=True).start()
        threading.Thread(target=self.step, daemon=True).start()
        yield from iter(self.out.get, None)
