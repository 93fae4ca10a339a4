#!/bin/sh
# The silo's own key pair, and a secret between its two processes. Send node.pub to the server, and nothing else.
set -e
umask 077
cd "$(dirname "$0")"
ssh-keygen -q -t ecdsa -b 384 -N "" -f node
head -c 32 /dev/urandom > node.secret
