"""Messages of tma: torch's TCPStore in pieces, against a gloo message between two processes, on loopback.

For weights of several sizes: seconds from the write of a trainer until the coordinator has read them, minimum of some
repetitions that alternate between both. The server is a process of its own, as in training.

usage: python benchmarks/message_store.py [--sizes 65536 1048576 …] [--times 7]
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time

import torch

SIZES = [1 << 16, 1 << 20, 1 << 24, 1 << 26]


def serve() -> None:
    """Serve messages until standard input ends."""
    from gnnfleet.comm.message_store import MessageStore

    store = MessageStore.serve()
    print(store.address, flush=True)
    sys.stdin.read()


def time_message_store(address: str, size: int) -> float:
    from gnnfleet.comm.message_store import Address, MessageStore

    trainer, coordinator = (MessageStore.connect(Address.parse(address)) for _ in range(2))
    body = torch.zeros(size, dtype=torch.uint8)
    started = time.perf_counter()
    trainer.write("update", {"steps": 1}, body)
    while (message := coordinator.read("update")) is None and time.perf_counter() - started < 10:
        time.sleep(0.0001)
    seconds = time.perf_counter() - started
    assert message is not None and len(message.body) == size
    trainer.remove("update")
    return seconds


def gloo_peer(port: int, sizes: list[int], times: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    for _ in range(times):
        for size in sizes:
            torch.distributed.send(torch.zeros(size, dtype=torch.uint8), 0)
            torch.distributed.recv(torch.zeros(1, dtype=torch.uint8), 0)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.peer is not None:
        gloo_peer(args.peer, args.sizes, args.times)
        return
    from record import write_results

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--times", str(args.times), "--sizes", *map(str, args.sizes)]
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    peer = subprocess.Popen([sys.executable, __file__, "--peer", str(port), *options])
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
        timings: dict[int, dict[str, list[float]]] = {size: {"post": [], "gloo": []} for size in args.sizes}
        for _ in range(args.times):
            for size in args.sizes:
                received = torch.zeros(size, dtype=torch.uint8)
                started = time.perf_counter()
                torch.distributed.recv(received, 1)
                timings[size]["gloo"].append(time.perf_counter() - started)
                torch.distributed.send(torch.zeros(1, dtype=torch.uint8), 1)
                timings[size]["post"].append(time_message_store(address, size))
        torch.distributed.destroy_process_group()
    finally:
        server.kill()
        peer.kill()
    cells = []
    for size, seconds_by_system in timings.items():
        cells.append({"cell": f"{size}", **{system: min(seconds) for system, seconds in seconds_by_system.items()}})
        print(
            "  ".join(f"{system} {1000 * min(seconds):8.2f} ms" for system, seconds in seconds_by_system.items()),
            f"  {size / 2**20:.2f} MiB",
        )
    print(write_results("post", cells))


if __name__ == "__main__":
    main()
