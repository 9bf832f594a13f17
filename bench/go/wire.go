package main

import (
	"encoding/binary"
	"net"
	"strconv"
	"sync"
	"time"
)

const (
	apiFetch     = 1
	apiHeartbeat = 12
	// Length, API key, version and correlation id.
	requestHeadBytes = 12
	// Length and correlation id.
	responseHeadBytes = 8
	lengthBytes       = 4
)

// Fetch is one Fetch response: when its last byte came, and its bytes with the length field.
type Fetch struct {
	AtS   float64 `json:"at_s"`
	Bytes int     `json:"bytes"`
}

// Wire notes what the connections of all members carry.
type Wire struct {
	lock             sync.Mutex
	started          time.Time
	fetches          []Fetch
	versions         map[string]int
	heartbeats       int
	heartbeatWaitMax time.Duration
	heartbeatGapMax  time.Duration
}

func newWire(started time.Time) *Wire {
	return &Wire{started: started, versions: map[string]int{}}
}

// memberDialer opens the connections of one member.
type memberDialer struct {
	wire *Wire
	// When this member last had sent a heartbeat; zero before its first one in a generation.
	lastHeartbeat time.Time
}

// Dial opens a connection that is watched.
func (d *memberDialer) Dial(network, address string) (net.Conn, error) {
	conn, err := net.Dial(network, address)
	if err != nil {
		return nil, err
	}
	return &watchedConn{Conn: conn, member: d, asked: map[uint32]asked{}}, nil
}

type asked struct {
	api uint16
	at  time.Time
}

// watchedConn reads along which requests go out and which responses come in.
type watchedConn struct {
	net.Conn
	member *memberDialer
	// By correlation id; guarded by the wire's lock, as all below.
	asked map[uint32]asked
	head  []byte
	// Bytes of the response that have not come yet, once its head is read.
	left     int
	bytes    int
	response asked
}

// Write passes one whole request on: the client writes each with one call.
func (c *watchedConn) Write(request []byte) (int, error) {
	c.noteRequest(request)
	return c.Conn.Write(request)
}

// Read passes on what came.
func (c *watchedConn) Read(buffer []byte) (int, error) {
	count, err := c.Conn.Read(buffer)
	c.noteResponse(buffer[:count])
	return count, err
}

func (c *watchedConn) noteRequest(request []byte) {
	if len(request) < requestHeadBytes {
		return
	}
	wire, now := c.member.wire, time.Now()
	wire.lock.Lock()
	defer wire.lock.Unlock()
	api := binary.BigEndian.Uint16(request[lengthBytes:])
	c.asked[binary.BigEndian.Uint32(request[8:])] = asked{api, now}
	switch api {
	case apiFetch:
		wire.versions[strconv.Itoa(int(binary.BigEndian.Uint16(request[6:])))]++
	case apiHeartbeat:
		wire.heartbeats++
		if last := c.member.lastHeartbeat; !last.IsZero() {
			wire.heartbeatGapMax = max(wire.heartbeatGapMax, now.Sub(last))
		}
		c.member.lastHeartbeat = now
	}
}

func (c *watchedConn) noteResponse(data []byte) {
	wire, now := c.member.wire, time.Now()
	wire.lock.Lock()
	defer wire.lock.Unlock()
	for len(data) > 0 {
		if c.left == 0 {
			missing := min(responseHeadBytes-len(c.head), len(data))
			c.head = append(c.head, data[:missing]...)
			data = data[missing:]
			if len(c.head) < responseHeadBytes {
				return
			}
			c.bytes = lengthBytes + int(binary.BigEndian.Uint32(c.head))
			c.left = c.bytes - responseHeadBytes
			correlation := binary.BigEndian.Uint32(c.head[lengthBytes:])
			c.response = c.asked[correlation]
			delete(c.asked, correlation)
			c.head = c.head[:0]
		}
		came := min(c.left, len(data))
		c.left -= came
		data = data[came:]
		if c.left == 0 {
			wire.answered(c.response, c.bytes, now)
		}
	}
}

func (w *Wire) answered(request asked, bytes int, now time.Time) {
	switch request.api {
	case apiFetch:
		w.fetches = append(w.fetches, Fetch{now.Sub(w.started).Seconds(), bytes})
	case apiHeartbeat:
		w.heartbeatWaitMax = max(w.heartbeatWaitMax, now.Sub(request.at))
	}
}

// newGeneration starts the gaps between a member's heartbeats anew: a rebalance needs none.
func (d *memberDialer) newGeneration() {
	d.wire.lock.Lock()
	defer d.wire.lock.Unlock()
	d.lastHeartbeat = time.Time{}
}
