"""Speaks to one worker as a router does: a Decode.Generate stream, without a router in between. For what a router decides
by itself (whether a prompt is prefilled by the decode worker, say) and a test or benchmark wants to decide instead."""
import itertools
import queue
import threading
import time

import grpc

from conftest import common_pb2, worker_grpc, worker_pb2


class Stream:
    """One request: tokens with the times at which they came, then its DecodeFinished."""

    def __init__(self):
        self.ids, self.times, self.finished = [], [], None
        self.reserved = None
        self.is_over = threading.Event()
        self.has_token = threading.Event()


class DecodeWorker:
    def __init__(self, address, router=0xd1):
        self.channel = grpc.insecure_channel(address)
        self.commands = queue.Queue()
        self.numbers = itertools.count(1)
        self.streams = {}
        hello = worker_pb2.DecodeCommand(hello=worker_pb2.DecodeHello(router=router))
        self.commands.put(hello)
        self.call = worker_grpc.DecodeStub(self.channel).Generate(iter(self.commands.get, None))
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        try:
            for events in self.call:
                now = time.monotonic()
                for number, token in zip(events.stream_ids, events.token_ids):
                    s = self.streams[number]
                    s.ids.append(token)
                    s.times.append(now)
                    s.has_token.set()
                for r in events.reserved:
                    self.streams[r.stream_id].reserved = r.target
                for f in events.finished:
                    self.streams[f.stream_id].finished = f
                    self.streams[f.stream_id].is_over.set()
        except grpc.RpcError:
            for s in self.streams.values():
                s.is_over.set()

    def start(self, tokens, max_tokens, temperature=0.0, seed=1, n_prompt=None, stop_ids=(), age_us=0, prefill=0):
        """prefill 0: the decode worker computes the prompt itself."""
        number, s = next(self.numbers), Stream()
        s.number = number
        self.streams[number] = s
        request = worker_pb2.TokenRequest(
            request_id=f"direct-{number}", token_ids=tokens, n_prompt=n_prompt or len(tokens), max_tokens=max_tokens,
            stop_ids=stop_ids, age_us=age_us, sampling=common_pb2.Sampling(temperature=temperature, seed=seed))
        start = worker_pb2.DecodeStart(stream_id=number, request=request, prefill=prefill)
        self.commands.put(worker_pb2.DecodeCommand(start=start))
        return s

    def cancel(self, s):
        self.commands.put(worker_pb2.DecodeCommand(cancel=worker_pb2.DecodeCancel(stream_id=s.number)))

    def run(self, *args, timeout=120, **settings):
        s = self.start(*args, **settings)
        assert s.is_over.wait(timeout), "the request did not end in time"
        return s

    def close(self):
        self.commands.put(None)
        self.reader.join(10)
        self.channel.close()
