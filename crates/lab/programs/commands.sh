# Bench: a shell script of many commands in pipelines, two each. Prints the seconds
# that it took.
pairs=$1
begin=$(date +%s.%N)
i=0
while [ "$i" -lt "$pairs" ]; do
    echo line | cat | tail -n 1 > /dev/null
    i=$((i + 1))
done
end=$(date +%s.%N)
awk "BEGIN { printf \"%.6f\\n\", $end - $begin }"
