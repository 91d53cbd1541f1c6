# shellcheck shell=bash
# To be sourced by checks. Waits for what another process of the guest does: 20 s, then status 1.

# wait_until COMMAND…: until it succeeds. Not often: every program's start is slow in a guest.
wait_until() {
  local try
  for ((try = 0; try < 100; try++)); do
    "$@" && return
    sleep 0.2
  done
  return 1
}

# listens PORT: a TCP socket, not one of an earlier run that lingers (0A is LISTEN).
listens() {
  grep -q "$(printf ':%04X 0*:0000 0A' "$1")" /proc/net/tcp /proc/net/tcp6
}

# cm_listens: something waits for connections of rdma_cm.
cm_listens() {
  [[ $(rdma resource show cm_id) == *LISTEN* ]]
}

# packets_beyond DEVICE COUNT: it has received more than COUNT since it was made.
packets_beyond() {
  [ "$(<"/sys/class/infiniband/$1/ports/1/hw_counters/rcvd_pkts")" -gt "$2" ]
}

# meet NAME: until the other node is there, too. Needs the script's `fail`.
meet() {
  lab meet "$1" || fail "the other node ended before '$1'"
}
