"""How long the parts of a mesh wait for one another, and in which order these waits end.

A prefill instance stages a prompt's KV, and a decode instance pulls it. A ticket is the right to
pull. A leg is a request's stay on one instance. When something stalls, the side that knows the
cause must report it before the others give up. A decode reports why a pull failed before the
gateway counts the leg as silent. A receiver reports a cut link before the time for the whole pull
is over.

The diagram shows the hand-over of one prompt's KV, in seconds. Each arrow is a time limit:

    offered     accepted            turn                KV there         token
       |-ANSWER 3->|                  |                    |               |
       |           |-TRANSFER 4.5---->|-TRANSFER 4.5------>|               |
       |           |                  |-STALL 2-> no bytes |               |
       |           |                  |-SILENT 0.25> others use the link   |
       |           |                  |     ... 4.5 +STOP 0.5: the connection is aborted
       |           |                  |     ... 4.5 +PULL_GRACE 0.25: the host fails the leg
       |           |-LEG_STALL 5----->|-LEG_STALL 5------->|-LEG_STALL 5-->| the gateway leaves
    |-TICKET_LEASE 10, renewed each third while a receiver waits or pulls->| the sender frees

`tests/unit/core/test_deadlines.py` asserts the order. If a setting controls a time, the value here
is the setting's default.
"""

from __future__ import annotations

from typing import Final

# --- the gateway, for one leg: core/request/machine.py, leg_silence.py ----------------------------

ANSWER_S: Final = 3.0  # an instance accepts or rejects an offer within this time
LEG_STALL_S: Final = 5.0  # a leg is lost if neither it nor its engine shows work for this long
# After a prefill is lost, a decode may report within this time that it already has all KV (F3).
HAD_KV_S: Final = 0.5

# --- the decode, for one pull: instance/legs/leg_life.py tells the engine -------------------------

# A pull has this time to get its turn, and the same time again to get its last byte.
TRANSFER_TIMEOUT_S: Final = 4.5
TRANSFER_STALL_S: Final = 2.0  # once prefill is done, a pull fails if no byte comes for this long
# If the engine's worker has not reported a pull this long after TRANSFER_TIMEOUT_S, the host fails
# the leg: engine/vllm/engine.py.
PULL_GRACE_S: Final = 0.25
# A host reports its engine's progress to gateways this often: instance/legs/host.py.
PROGRESS_EVERY_S: Final = 0.5

# --- the receiver, for the end of one pull: core/kv/transfer/receiver.py --------------------------

# After a pull's deadline, a live sender has this time to answer and to send its last bytes.
STOP_S: Final = 0.5
# A link that brings no bytes for this long is free for other pulls. A working link is never silent
# for so long.
SILENT_S: Final = 0.25
PULL_DRAIN_S: Final = 5.0  # the time for the last bytes of a pull that was given up

# --- the sender, for staged KV: core/kv/transfer/sender.py ----------------------------------------

TICKET_LEASE_S: Final = 10.0  # after this time a ticket ends, unless it is pulled or renewed
RENEWALS_PER_LEASE: Final = 3  # renewals per lease by a receiver that waits or pulls
# A ticket is not renewed beyond this many leases after its last layer was staged.
MAX_LEASES: Final = 30

# --- the instance ---------------------------------------------------------------------------------

# A prefill waits this long for image embeddings from an encoder instance, and then encodes the
# images itself. It shows no work while it waits, so the time is below LEG_STALL_S:
# engine/awaited_embeddings.py.
ENCODE_WAIT_S: Final = 4.0
# A gateway that reads nothing for this long is disconnected: instance/legs/outbox.py.
OUTBOX_STALL_S: Final = 10.0
# An engine that neither answers pings nor computes a layer is slow after ENGINE_SLOW_S. After
# ENGINE_HUNG_S the instance ends itself: core/instance/engine_watchdog.py.
ENGINE_SLOW_S: Final = 5.0
ENGINE_HUNG_S: Final = 30.0
