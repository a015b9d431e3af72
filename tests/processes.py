"""Real processes of one gloo group, kept between tests."""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Failed(AssertionError):
    pass


class Processes:
    """n processes in one group of torch.distributed. run(function, *args) calls function(*args) in each of them and returns the list of results;
    an exception in one of them is raised here, and ends them all."""

    def __init__(self, n: int, timeout: float = 60):
        self.n, self.timeout, self.workers = n, timeout, []

    def start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.tensor", "torch._dynamo", "mha_ext"])  # imported once for all
        self.folder = tempfile.TemporaryDirectory()
        meeting = "file://" + os.path.join(self.folder.name, "store")
        for rank in range(self.n):
            pipe, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, rank, self.n, meeting, self.timeout), daemon=True)
            process.start()
            other.close()
            self.workers.append((process, pipe))

    def run(self, function, *args) -> list:
        if not self.workers:
            self.start()
        for _, pipe in self.workers:
            pipe.send((function, args))
        results, problems = [], []
        for rank, (_, pipe) in enumerate(self.workers):
            try:
                problem, result = pipe.recv() if pipe.poll(2 * self.timeout) else ("no answer", None)
            except (EOFError, ConnectionError):
                problem, result = "ended", None
            results.append(result)
            if problem:
                problems.append(f"process {rank} of {self.n}: {problem}")
        if problems:
            self.stop()
            raise Failed("\n".join(problems))
        return results

    def stop(self) -> None:
        for _, pipe in self.workers:
            pipe.close()  # a process that waits for work ends then
        for process, _ in self.workers:
            process.join(1)
            process.kill()
            process.join()
        if self.workers:
            self.folder.cleanup()
        self.workers = []


def _serve(pipe, rank: int, n: int, meeting: str, timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=n, timeout=datetime.timedelta(seconds=timeout)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = None, function(*args)
        except BaseException:  # noqa: BLE001  (it is raised where the answer arrives)
            answer = traceback.format_exc(), None
        pipe.send(answer)
