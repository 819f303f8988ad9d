#!/bin/bash
# Runs a command with the environment of CANN: the image has CANN, the host lends the driver.
# The first set_env.sh that is there; which path it has depends on CANN's release.
driver=/usr/local/Ascend/driver/lib64
export LD_LIBRARY_PATH="$driver:$driver/common:$driver/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
for file in /usr/local/Ascend/cann/set_env.sh /usr/local/Ascend/ascend-toolkit/set_env.sh; do
  if [ -r "$file" ]; then
    # shellcheck disable=SC1090
    source "$file"
    exec "$@"
  fi
done
echo "with-cann: expected /usr/local/Ascend/{cann,ascend-toolkit}/set_env.sh, found neither: is this a CANN image?" >&2
exit 1
