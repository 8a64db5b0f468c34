package rules

import (
	"net/netip"
	"strings"
	"testing"
)

func addr(prefix string, port uint16) Address {
	return Address{Prefix: netip.MustParsePrefix(prefix), Port: port}
}

func host(name string, port uint16) Address { return Address{Host: name, Port: port} }

func TestParseAddress(t *testing.T) {
	long := strings.Repeat(strings.Repeat("a", 62)+".", 4) + "b" // 253
	for _, tc := range []struct {
		in   string
		want Address
		text string // "" as in
	}{
		{"10.96.0.1:443", addr("10.96.0.1/32", 443), ""},
		{"10.96.0.1/32:443", addr("10.96.0.1/32", 443), "10.96.0.1:443"},
		{"127.0.0.1:1", addr("127.0.0.1/32", 1), ""},
		{"169.254.1.1:65535", addr("169.254.1.1/32", 65535), ""},
		{"10.9.0.0/16:6443", addr("10.9.0.0/16", 6443), ""},
		{"[fd00::1]:443", addr("fd00::1/128", 443), ""},
		{"[FD00:0::0001]:443", addr("fd00::1/128", 443), "[fd00::1]:443"},
		{"[fd00::1/128]:443", addr("fd00::1/128", 443), "[fd00::1]:443"},
		{"[fd00::/64]:6443", addr("fd00::/64", 6443), ""},
		{"[::1]:6443", addr("::1/128", 6443), ""},
		{"kas.example.svc:6443", host("kas.example.svc", 6443), ""},
		{"KAS.Example.svc:6443", host("kas.example.svc", 6443), "kas.example.svc:6443"},
		{"kas.example.:6443", host("kas.example.", 6443), ""},
		{"localhost:6443", host("localhost", 6443), ""},
		{"1.kas:6443", host("1.kas", 6443), ""},
		{"10.0.0.1.example:6443", host("10.0.0.1.example", 6443), ""},
		{"xn--bcher-kva.example:443", host("xn--bcher-kva.example", 443), ""},
		{strings.Repeat("a", 63) + ":1", host(strings.Repeat("a", 63), 1), ""},
		{long + ":443", host(long, 443), ""},
		{long + ".:443", host(long+".", 443), ""},
	} {
		got, err := ParseAddress(tc.in)
		if err != nil || got != tc.want {
			t.Errorf("ParseAddress(%q) = %v, %v; want %v", tc.in, got, err, tc.want)
			continue
		}
		if tc.text == "" {
			tc.text = tc.in
		}
		if got.String() != tc.text {
			t.Errorf("ParseAddress(%q).String() = %q; want %q", tc.in, got, tc.text)
		}
	}
}

// badAddresses are refused with a text that holds the given remedy.
var badAddresses = []struct{ in, remedy string }{
	{"", "write HOST:PORT"},
	{"10.96.0.1", "write HOST:PORT"},
	{"fd00::1", "brackets: [fd00::1]:443"},
	{"[fd00::1]", "no port behind the brackets"},
	{"[fd00::1]443", "no port behind the brackets"},
	{"[fd00::1:443", "no port behind the brackets"},
	{"10.96.0.1:0", "1-65535"},
	{"10.96.0.1:65536", "1-65535"},
	{"10.96.0.1:+443", "1-65535"},
	{"10.96.0.1:0443", "1-65535"},
	{"10.96.0.1:https", "1-65535"},
	{"10.96.0.1:", "1-65535"},
	{"10.96.0.1:443 ", "1-65535"},
	{"[10.96.0.1]:443", "brackets are for IPv6 alone"},
	{"[kas.example]:443", "not an IP address"},
	{"fd00::/64:6443", "brackets: [fd00::/64]:6443"},
	{"[fe80::1%eth0]:443", "without %"},
	{"[fe80::%eth0/64]:443", "without %"},
	{"[::ffff:10.0.0.1]:443", "write it as IPv4 (10.0.0.1)"},
	{"[::ffff:10.0.0.0/104]:443", "write it as IPv4"},
	{"0.0.0.0:443", "means any address"},
	{"0.0.0.0/0:443", "means any address"},
	{"[::]:443", "means any address"},
	{"[::/0]:443", "means any address"},
	{"224.0.0.1:443", "no address of one host"},
	{"[ff02::1]:443", "no address of one host"},
	{"255.255.255.255:443", "no address of one host"},
	{"10.9.1.5/16:443", "write 10.9.0.0/16"},
	{"[fd00::5/64]:443", "write fd00::/64"},
	{"10.9.0.0/33:443", "not an IP address or prefix"},
	{"10.9.0.0/016:443", "not an IP address or prefix"},
	{"kas.example/16:443", "not an IP address or prefix"},
	{"10.0.0.256:443", "neither an IPv4 address nor a host name"},
	{"010.0.0.1:443", "neither an IPv4 address nor a host name"},
	{"10.0.1:443", "neither an IPv4 address nor a host name"},
	{"443:443", "neither an IPv4 address nor a host name"},
	{":443", "empty"},
	{".:443", "empty"},
	{"kas..example:443", "empty"},
	{".kas:443", "empty"},
	{"kas..:443", "empty"},
	{"-kas.example:443", "hyphen"},
	{"kas-.example:443", "hyphen"},
	{"kas_a.example:443", "'_' is not allowed"},
	{"*.example:443", "'*' is not allowed"},
	{"kas example:443", "' ' is not allowed"},
	{"kas\x00:443", "is not allowed"},
	{"käs.example:443", "xn--"},
	{strings.Repeat("a", 64) + ":443", "longer than 63"},
	{strings.Repeat("a.", 127) + "b:443", "longer than 253"},  // 255
	{strings.Repeat("a.", 126) + "bb:443", "longer than 253"}, // 254
}

func TestParseAddressRefuses(t *testing.T) {
	for _, tc := range badAddresses {
		if got, err := ParseAddress(tc.in); err == nil || !strings.Contains(err.Error(), tc.remedy) {
			t.Errorf("ParseAddress(%q) = %v, %v; want an error with %q", tc.in, got, err, tc.remedy)
		}
	}
}

// Destinations are named by any FQDN and by an IPv6 address in brackets; an
// IPv6 address without brackets is refused with the brackets as remedy, though
// its last group could be read as a port.
func TestCase_B69_NamesAndBrackets(t *testing.T) {
	for in, want := range map[string]Address{
		"kas.example.svc:6443":             host("kas.example.svc", 6443),
		"api.eu-1.cluster.example.org:443": host("api.eu-1.cluster.example.org", 443),
		"localhost:6443":                   host("localhost", 6443),
		"[fd00::1]:6443":                   addr("fd00::1/128", 6443),
	} {
		if got, err := ParseAddress(in); err != nil || got != want {
			t.Errorf("ParseAddress(%q) = %v, %v; want %v", in, got, err, want)
		}
		if got, err := ParseTarget("443:" + in); err != nil || got.Name != in || got.Listen != 443 || got.Addresses[0] != want {
			t.Errorf("ParseTarget(443:%s) = %+v, %v", in, got, err)
		}
	}
	for _, in := range []string{"fd00::1:6443", "fd00::1:443", "2001:db8:0:0:0:0:0:1:6443"} {
		i := strings.LastIndex(in, ":")
		remedy := "write it in brackets: [" + in[:i] + "]" + in[i:]
		if got, err := ParseAddress(in); err == nil || !strings.Contains(err.Error(), remedy) {
			t.Errorf("ParseAddress(%q) = %v, %v; want the remedy %q", in, got, err, remedy)
		}
		if got, err := ParseTarget("6443:" + in); err == nil || !strings.Contains(err.Error(), remedy) {
			t.Errorf("ParseTarget(6443:%s) = %v, %v; want the remedy %q", in, got, err, remedy)
		}
	}
}

func TestParseTarget(t *testing.T) {
	for in, want := range map[string]Target{
		"6443:localhost:6443":       {Name: "localhost:6443", Listen: 6443, Addresses: []Address{host("localhost", 6443)}},
		"443:[fd00::1]:6443":        {Name: "[fd00::1]:6443", Listen: 443, Addresses: []Address{addr("fd00::1/128", 6443)}},
		"6443:KAS.example.svc:6443": {Name: "kas.example.svc:6443", Listen: 6443, Addresses: []Address{host("kas.example.svc", 6443)}},
		"1:127.0.0.1:2":             {Name: "127.0.0.1:2", Listen: 1, Addresses: []Address{addr("127.0.0.1/32", 2)}},
	} {
		got, err := ParseTarget(in)
		if err != nil || got.Name != want.Name || got.Listen != want.Listen || got.Exact || len(got.Addresses) != 1 || got.Addresses[0] != want.Addresses[0] {
			t.Errorf("ParseTarget(%q) = %+v, %v; want %+v", in, got, err, want)
		}
	}
	for in, remedy := range map[string]string{
		"":                     "LPORT:HOST:PORT",
		"6443":                 "LPORT:HOST:PORT",
		"localhost:6443":       "LPORT:HOST:PORT",
		":localhost:6443":      "1-65535",
		"0:localhost:6443":     "1-65535",
		"70000:localhost:6443": "1-65535",
		"6443:localhost:0":     "1-65535",
		"6443::6443":           "empty",
		"6443:10.9.0.0/16:443": "not to a prefix",
	} {
		if got, err := ParseTarget(in); err == nil || !strings.Contains(err.Error(), remedy) {
			t.Errorf("ParseTarget(%q) = %+v, %v; want an error with %q", in, got, err, remedy)
		}
	}
}

func FuzzParseAddress(f *testing.F) {
	for _, tc := range badAddresses {
		f.Add(tc.in)
	}
	f.Fuzz(func(t *testing.T, in string) {
		a, err := ParseAddress(in)
		if err != nil {
			if a != (Address{}) {
				t.Fatalf("%q: %v beside the error %v", in, a, err)
			}
			return
		}
		if (a.Host == "") != a.Prefix.IsValid() || a.Port == 0 || a.Prefix.Addr().Is4In6() || a.Prefix.IsValid() && a.Prefix != a.Prefix.Masked() {
			t.Fatalf("%q is read as %+v", in, a)
		}
		if b, err := ParseAddress(a.String()); err != nil || a != b {
			t.Fatalf("%q is %q, which is read as %v, %v", in, a, b, err)
		}
	})
}

func FuzzParseTarget(f *testing.F) {
	for _, tc := range badAddresses {
		f.Add("6443:" + tc.in)
	}
	f.Fuzz(func(t *testing.T, in string) {
		a, err := ParseTarget(in)
		if err != nil {
			return
		}
		if a.Listen == 0 || len(a.Addresses) != 1 || !a.Addresses[0].Single() || a.Name != a.Addresses[0].String() {
			t.Fatalf("%q is read as %+v", in, a)
		}
		if len(a.Name) <= 253 && len(Check([]Target{a})) > 0 {
			t.Fatalf("%q: %v", in, Check([]Target{a}))
		}
	})
}
