"""What the processes tell each other besides plans, results, requests and tokens.

Each socket has one union of message types per direction (`cluster.messages.sockets`);
`cluster.wire` turns them into bytes. Every message is a MessagePack map whose `type` entry names
it. Durations are seconds, sizes bytes, lengths tokens; no timestamps, since clocks differ.
"""
