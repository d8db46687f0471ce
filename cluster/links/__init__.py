"""The only place that knows ZeroMQ: sockets that carry one frame per message.

The engine binds two ROUTER sockets and everybody dials them with a DEALER. Nothing is waited
for without a deadline, every queue is bounded, and what a peer sends can only arrive as bytes.
A peer that leaves is noticed at once; one whose host or link is dead, by ZeroMQ's heartbeats.
On one host (ipc://) there are none: the kernel says when a process ends, and one that is only
stopped for a while (SIGSTOP, a snapshot, a full disk of swap) goes on where it was.
"""
