"""Real processes on this machine that talk over gloo: made once, given many jobs, never waited for without end."""

import atexit
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.multiprocessing as mp

START = 180  # seconds to import torch on a busy machine
JOB = 90


def _serve(rank, world, store, pipe):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=2 * START)
    )
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(rank, world, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """`world` processes; `run(f, *args)` calls f(rank, world, *args) in each and returns their answers by rank."""

    def __init__(self, world):
        self.world = world
        self._processes = []

    def _start(self):
        # A server that has imported torch once makes all ranks; each of them would take seconds for it.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "kourkoutas.torch"])
        store = os.path.join(tempfile.mkdtemp(), "store")
        pairs = [context.Pipe() for _ in range(self.world)]
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, self.world, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for rank in range(self.world):
            self._answer(rank, START)

    def _answer(self, rank, seconds):
        if not self._pipes[rank].poll(seconds):
            self.stop()
            raise TimeoutError(f"rank {rank} of {self.world} did not answer within {seconds} s")
        return self._pipes[rank].recv()

    def run(self, function, *args, seconds=JOB):
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers, end = {}, time.monotonic() + seconds
        while len(answers) < self.world:
            waiting = {self._pipes[rank]: rank for rank in range(self.world) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            for pipe in ready:
                answers[waiting[pipe]] = pipe.recv()
            failed = [f"rank {rank}:\n{answer}" for rank, (ok, answer) in answers.items() if not ok]
            if failed:  # the others may be in the middle of a collective
                end = min(end, time.monotonic() + 5)
            if not ready:
                failed.append(f"ranks {sorted(waiting.values())} did not answer")
            if failed and (not ready or len(answers) == self.world):
                self.stop()
                raise AssertionError("\n".join(failed))
        return [answers[rank][1] for rank in range(self.world)]

    def stop(self):
        for process in self._processes:
            process.terminate()
            process.join(5)
            process.kill()
        self._processes = []


_ALL = {}


def ranks(world):
    """The processes of this test run, shared by all tests."""
    if world not in _ALL:
        _ALL[world] = Ranks(world)
        atexit.register(_ALL[world].stop)
    return _ALL[world]
