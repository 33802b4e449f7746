exec 2>&1
export PYTHONPATH=$PWD/.site
D='"model=llama","model.num_layers=32","model.hidden_size=512","model.num_heads=8","device=cuda","compiler=inductor","capture.sizes=[1,8]"'
for a in '"cache.dir=/tmp/warm"' '"cache.dir=/tmp/warm","capture.self_check=false"' ; do for d in float32 bfloat16; do for i in 1 2; do timeout 60 python3 .gpu_profile.py "[$D,$a,\"dtype=$d\"]" > /tmp/x.txt 2>&1; echo == $d $a; tail -2 /tmp/x.txt | cut -c1-330; done; done; done
for d in float32 bfloat16; do python3 -m pcgsvc model=llama model.num_layers=32 model.hidden_size=512 model.num_heads=8 compiler=inductor cache.mode=off capture.sizes=[1,8] dtype=$d report=$OUT/r-$d.json > /tmp/y.txt 2>&1; python3 -c "
import json; r=json.load(open('$OUT/r-$d.json'))
for v in r['verify']: print(v)"; done
